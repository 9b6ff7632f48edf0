// A logical device. All programs of a process on the same physical device share it.
#pragma once

#include "pipeline_cache.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

namespace lapilli {

struct Queue {
  VkQueue handle = VK_NULL_HANDLE;
  std::mutex mutex; // queues are externally synchronised
};

class Device {
public:
  // Opens the device, or returns the one that is open already and has not been lost.
  static std::shared_ptr<Device> open(Instance& instance, uint32_t index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Capabilities& capabilities;
  const uint32_t index; // among Instance::devices
  DeviceFunctions vk;
  VkDevice handle = VK_NULL_HANDLE;

  // Runs are spread over a few queues, so that those in flight at the same time need not wait for each other's
  // barriers.
  Queue& next_queue();
  // The one of streams and of programs with states: what is submitted first happens first.
  Queue& ordered_queue() { return *queues_.front(); }
  // Where this throws OUT_OF_MEMORY, nothing was submitted, and the same may be submitted again.
  void submit(Queue& queue, VkCommandBuffer commands, VkFence fence);

  // False when the fence is not signalled within `timeout` nanoseconds. Spins for a moment before it sleeps, where that
  // saves the time of waking up. What a fence guards may be destroyed when this has returned true, or has thrown: then the
  // device is lost. A driver that is out of memory cannot say how far the device is; it is asked again until it can.
  bool wait(VkFence fence, uint64_t timeout) const;

  // What all programs share, in a folder: each with one of its own would hold the whole file. `folder` may be empty.
  PipelineCache& pipeline_cache(const std::filesystem::path& folder);

  // As lapilli::check, for what only a device says: it is remembered that it is lost.
  void check(VkResult result, const char* call) const;
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

private:
  Device(Instance& instance, uint32_t index);
  [[noreturn]] void lose(VkResult result, const char* call) const;

  mutable std::atomic<bool> lost_{false};
  std::vector<std::unique_ptr<Queue>> queues_;
  std::mutex caches_mutex_;
  std::map<std::filesystem::path, std::unique_ptr<PipelineCache>> caches_;
  std::atomic<uint32_t> next_{0};
  uint64_t spin_nanoseconds_;
};

// Command buffers of one thread or one run, with a fence to wait for them.
class Commands {
public:
  // `queue`: where they are submitted; null: the next in turn.
  explicit Commands(Device& device, Queue* queue = nullptr);
  ~Commands();
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  VkCommandBuffer allocate();
  void begin(VkCommandBuffer commands);
  void end(VkCommandBuffer commands); // throws OUT_OF_MEMORY where what was recorded is lost
  void submit(VkCommandBuffer commands); // throws OUT_OF_MEMORY where it may be submitted again
  bool wait(uint64_t timeout) const { return device_.wait(fence_, timeout); }
  void submit_and_wait(VkCommandBuffer commands);

private:
  Device& device_;
  Queue& queue_;
  VkCommandPool pool_ = VK_NULL_HANDLE;
  VkFence fence_ = VK_NULL_HANDLE;
};

inline constexpr uint64_t no_timeout = UINT64_MAX;

} // namespace lapilli
