// The driver's pipeline cache: one of a device in a process, and a file on disk for each device and driver, replaced in one step.
// A file that is damaged, of another driver or another user, or that others may write, is ignored.
#pragma once

#include "hal/vulkan/instance.h"

#include <atomic>
#include <mutex>
#include <string>

namespace lapilli::vulkan {

class PipelineCache {
public:
  // `folder` may be empty: nothing on disk.
  PipelineCache(const DeviceFunctions& functions, VkDevice device, const PhysicalDevice& physical,
                const std::string& folder);
  ~PipelineCache();
  PipelineCache(const PipelineCache&) = delete;
  PipelineCache& operator=(const PipelineCache&) = delete;

  VkPipelineCache handle() const { return handle_; }
  const std::string& file() const { return file_; }
  // Whether the file was there when this was made, or was written since.
  bool found() const { return size_ > 0; }
  // Writes the file when pipelines were added. A large one only when there are many: it is written whole each time. That it
  // cannot be written is no error: the next load is only slower.
  void store(bool all = false) noexcept;

private:
  const DeviceFunctions& vk; // of the device
  VkDevice device_;
  const PhysicalDevice& physical_;
  std::string file_;
  VkPipelineCache handle_ = VK_NULL_HANDLE;
  std::mutex mutex_;            // of writing
  std::atomic<size_t> size_{0}; // of what the file holds
};

} // namespace lapilli::vulkan
