// Kernels on CPU drivers are native code of this process, and robust buffer access does not cover work-group memory and variables
// of an invocation: there an index beyond an array reaches whatever lies behind it.
#pragma once

#include "format/model.h"

namespace lapilli {

// Verified code in which every computed index into an array or vector of work-group memory or of an invocation's variables is
// limited to its last element (which a negative index, as a large unsigned number, becomes too).
std::vector<uint32_t> clamp_indices(const std::vector<uint32_t>& code);

} // namespace lapilli
