// A walk over a SPIR-V module: enough to be sure that it can be read to its end, that it is the compute kernel that the
// program says it is, and what it asks of a device. It is no validator: see the trust model in docs/architecture.md.
#pragma once

#include "model.h"

namespace lapilli {

// Verifies kernel.code against the rest of `kernel`, and fills in entry_point, spirv_version and capabilities.
// Throws INVALID_FILE.
void verify_spirv(Kernel& kernel);

} // namespace lapilli
