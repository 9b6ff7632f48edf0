// What a method would need for given sizes, as JSON for tools. It takes no device.
#pragma once

#include "format/model.h"

namespace lapilli {

// Where arena buffers are placed and what the commands cost for given values of the symbols.
std::string describe_memory(const Model& model, uint32_t method, uint32_t plan, std::span<const int64_t> symbols);

} // namespace lapilli
