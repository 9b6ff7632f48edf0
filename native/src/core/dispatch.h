// A command of a plan for the sizes of a run.
#pragma once

#include "core/memory.h"
#include "format/expr.h"

namespace lapilli {

// A command with all its expressions computed and checked against its buffers and the device.
struct ResolvedDispatch {
  std::array<uint32_t, 3> groups{};
  std::array<uint32_t, max_push_size / 4> params{};
  std::array<Region, max_bindings> bindings{};

  bool empty() const { return groups[0] == 0 || groups[1] == 0 || groups[2] == 0; }
};

// `regions[i]`: where buffer i of the plan is; `most_groups`: work groups that a command may have.
ResolvedDispatch resolve(const hal::Capabilities& device, const Dispatch& command, const Kernel& kernel,
                         const Values& values, std::span<const Region> regions, uint64_t most_groups);

// Throws where a buffer of `size` bytes does not hold what it is for, or much more.
void check_room(uint64_t size, uint64_t tensor, const Buffer& buffer);

} // namespace lapilli
