// From the bytes of a file to a verified model.
#pragma once

#include "format/container.h"
#include "format/model.h"

namespace lapilli {

// Verifies the structure, every index and every range in it, and the SPIR-V code. Throws INVALID_FILE with the first
// thing that does not hold. The model does not refer to `container`.
Model read_model(const Container& container);

} // namespace lapilli
