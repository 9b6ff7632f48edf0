// A Vulkan buffer with memory of its own.
#pragma once

#include "hal/vulkan/device.h"

namespace lapilli::vulkan {

class Buffer final : public hal::Buffer {
public:
  // As hal::Device::create_buffer.
  static std::unique_ptr<Buffer> create(const Device& device, uint64_t bytes, hal::MemoryUse use, uint64_t& most);
  ~Buffer() override;

  VkBuffer handle() const { return handle_; }
  void invalidate() const override;

private:
  Buffer(const Device& device, uint64_t bytes) : hal::Buffer(bytes), device_(device) {}
  bool allocate(hal::MemoryUse use, uint64_t& most);

  const Device& device_;
  VkBuffer handle_ = VK_NULL_HANDLE;
  VkDeviceMemory memory_ = VK_NULL_HANDLE;
};

inline VkBuffer handle_of(const hal::Region& region) { return static_cast<const Buffer*>(region.buffer)->handle(); }

} // namespace lapilli::vulkan
