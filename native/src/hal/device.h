// An open device. All programs and streams of a process on the same device share it.
#pragma once

#include "hal/capabilities.h"
#include "hal/commands.h"

#include <atomic>
#include <memory>

namespace lapilli::hal {

enum class Order {
  any, // spread over the device's queues: those in flight at the same time need not wait for each other's barriers
  submitted, // for streams and programs with states: what is submitted first happens first
};

class Device {
public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Capabilities& capabilities;
  const uint32_t index; // among the driver's devices

  // Null where there is not so much memory; `most`: of what it allows at all for this use where that is less, else 0.
  virtual std::unique_ptr<Buffer> create_buffer(uint64_t bytes, MemoryUse use, uint64_t& most) = 0;
  // Memory that others can be told of; null as above. Throws UNSUPPORTED where the device has no such kind.
  virtual std::unique_ptr<Buffer> create_shared(uint64_t bytes, Handle kind) = 0;
  // Memory of somebody else, who keeps it until the buffer is gone. Throws UNSUPPORTED or INVALID_ARGUMENT.
  virtual std::unique_ptr<Buffer> import(const SharedMemory& memory, uint64_t bytes) = 0;
  // `used[i]`: kernel i is needed. The kernels must stay until the pipelines are finished. `cache_folder` may be empty: no
  // cache on disk.
  virtual std::unique_ptr<Pipelines> compile(std::span<const Kernel> kernels, const std::vector<bool>& used,
                                             const std::string& cache_folder) = 0;
  virtual std::unique_ptr<Commands> create_commands(Order order) = 0;
  virtual std::unique_ptr<Timestamps> create_timestamps(uint32_t count) = 0; // where it has any

  // It stopped working: nothing runs on it any more, and a new one must be opened.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

protected:
  Device(const Capabilities& what, uint32_t number) : capabilities(what), index(number) {}

  mutable std::atomic<bool> lost_{false};
};

} // namespace lapilli::hal
