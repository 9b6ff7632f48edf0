// What is in a program, as JSON for people and tools.
#pragma once

#include "container.h"
#include "model.h"

#include <span>

namespace lapilli {

std::string describe(const Model& model, const Container& container);

// Where arena buffers are placed and what the commands cost for given values of the symbols.
std::string describe_memory(const Model& model, uint32_t method, uint32_t plan, std::span<const int64_t> symbols);

// Flag names of Requirements::features.
std::vector<std::string> feature_names(uint64_t features);

} // namespace lapilli
