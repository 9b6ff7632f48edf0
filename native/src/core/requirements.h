// Whether a device can run a plan, and if not, why.
#pragma once

#include "format/expr.h"
#include "hal/capabilities.h"

namespace lapilli {

// Why the device cannot run this plan of a method, in words; empty when it can.
// `values`: of the method's expressions where they are not `dynamic`.
std::vector<std::string> missing(const hal::Capabilities& device, const Plan& plan, std::span<const Kernel> kernels,
                                 const Values& values, const std::vector<bool>& dynamic);

} // namespace lapilli
