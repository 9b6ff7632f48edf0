// Memory for tensors whose sizes are known together: constants, states, inputs and outputs, the arena of a run.
#pragma once

#include "core/memory.h"
#include "core/planner.h"

namespace lapilli {

// In as few buffers as the device allows, as a MemoryPlan says. An Allocator hands memory out piece by piece instead.
class PlannedMemory {
public:
  // Afterwards there is room for tensors of these sizes, one after the other. What was in the memory is lost when it has to
  // grow. `what` they are goes into the message when there is not enough memory.
  void lay_out(hal::Device& device, std::span<const uint64_t> sizes, MemoryUse use, MemoryCounter& counter,
               const char* what);
  // The same, each in a buffer of its own.
  void lay_out_apart(hal::Device& device, std::span<const uint64_t> sizes, MemoryUse use, MemoryCounter& counter,
                     const char* what);

  Region operator[](size_t tensor) const;
  void invalidate() const; // see hal::Buffer
  uint64_t size() const;
  std::span<const GpuBuffer> buffers() const { return buffers_; }

private:
  void ensure(hal::Device& device, std::span<const uint64_t> sizes, MemoryPlan plan, MemoryUse use,
              MemoryCounter& counter, const char* what);

  std::vector<uint64_t> sizes_;
  std::vector<Place> places_;
  std::vector<GpuBuffer> buffers_;
};

// Bytes by which bindings are widened, filled with NaN: 0 except in tests (LAPILLI_BINDING_SLACK). A kernel that reads out of
// bounds gets NaN there, where most drivers return zeros and hide it.
uint64_t binding_slack();

} // namespace lapilli
