// Whether SPIR-V code is what Lapilli's compiler would write: instructions of a list with operands of the right types,
// structured control flow, the compute kernel that the program says it is, no more memory and code than allowed. See the trust
// model in docs/architecture.md.
#pragma once

#include "format/model.h"

namespace lapilli {

// Verifies kernel.code against the rest of `kernel`, and fills in entry_point, spirv_version, capabilities and stored.
// Throws INVALID_FILE.
void verify_spirv(Kernel& kernel);

} // namespace lapilli
