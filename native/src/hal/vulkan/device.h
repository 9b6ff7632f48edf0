// A logical device. All programs and streams of a process on the same physical device share it.
#pragma once

#include "hal/device.h"
#include "hal/vulkan/pipeline_cache.h"

#include <map>

namespace lapilli::vulkan {

struct Queue {
  VkQueue handle = VK_NULL_HANDLE;
  std::mutex mutex;              // queues are externally synchronised
  void (*lock)(void*) = nullptr; // of the application, where it uses the queue, too
  void (*unlock)(void*) = nullptr;
  void* user = nullptr;
};

class Device final : public hal::Device {
public:
  // Opens the device, or returns the one that is open already and has not been lost.
  static std::shared_ptr<Device> open(Instance& instance, uint32_t index);
  // One that the application made; `given` is needed during the call alone.
  static std::shared_ptr<Device> take(std::shared_ptr<Instance> instance, const lapilli_vulkan& given);
  ~Device() override;

  const PhysicalDevice& physical;
  DeviceFunctions vk;
  VkDevice handle = VK_NULL_HANDLE;

  std::unique_ptr<hal::Buffer> create_buffer(uint64_t bytes, hal::MemoryUse use, uint64_t& most) override;
  std::unique_ptr<hal::Buffer> create_shared(uint64_t bytes, hal::Handle kind) override;
  std::unique_ptr<hal::Buffer> import(const hal::SharedMemory& memory, uint64_t bytes) override;
  std::unique_ptr<hal::Pipelines> compile(std::span<const Kernel> kernels, const std::vector<bool>& used,
                                          const std::string& cache_folder) override;
  std::unique_ptr<hal::Commands> create_commands(hal::Order order) override;
  std::unique_ptr<hal::Timestamps> create_timestamps(uint32_t count) override;

  Queue& queue(hal::Order order);
  // Where this throws OUT_OF_MEMORY, nothing was submitted, and the same may be submitted again.
  void submit(Queue& queue, VkCommandBuffer commands, VkFence fence);

  // False when the fence is not signalled within `timeout` nanoseconds. Spins for a moment before it sleeps, where that
  // saves the time of waking up. What a fence guards may be destroyed when this has returned true, or has thrown: then the
  // device is lost. A driver that is out of memory cannot say how far the device is; it is asked again until it can.
  bool wait(VkFence fence, uint64_t timeout) const;

  // What all programs share, in a folder: each with one of its own would hold the whole file. `folder` may be empty.
  PipelineCache& pipeline_cache(const std::string& folder);

  // As vulkan::check, for what only a device says: it is remembered that it is lost.
  void check(VkResult result, const char* call) const;

private:
  Device(Instance& instance, uint32_t index);
  Device(std::shared_ptr<Instance> instance, const lapilli_vulkan& given);
  [[noreturn]] void lose(VkResult result, const char* call) const;

  const std::shared_ptr<Instance> taken_; // of a device of the application
  std::vector<std::unique_ptr<Queue>> queues_;
  std::mutex caches_mutex_;
  std::map<std::string, std::unique_ptr<PipelineCache>> caches_;
  std::atomic<uint32_t> next_{0};
  uint64_t spin_nanoseconds_;
};

} // namespace lapilli::vulkan
