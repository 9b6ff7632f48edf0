// Whether a device can run a plan, and if not, why.
#pragma once

#include "format/expr.h"
#include "hal/capabilities.h"

namespace lapilli {

// Why a device cannot run a plan; no reasons when it can.
struct Missing {
  std::vector<std::string> reasons; // in words
  uint64_t at_once = 0;             // the most bytes of a buffer that a kernel binds, where that is more than the limit
  bool only_sizes = true;           // the device lacks nothing but a larger limit of those bytes
};

// `values`: of the method's expressions where they are not `dynamic`.
Missing missing(const hal::Capabilities& device, const Plan& plan, std::span<const Kernel> kernels,
                const Values& values, const std::vector<bool>& dynamic);

} // namespace lapilli
