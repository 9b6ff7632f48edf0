// What is in a program, as JSON for people and tools.
#pragma once

#include "format/container.h"
#include "format/model.h"

namespace lapilli {

std::string describe(const Model& model, const Container& container);

// Flag names of Requirements: features and subgroup operations.
std::vector<std::string> feature_names(uint64_t features);
std::vector<std::string> subgroup_names(uint32_t operations);

} // namespace lapilli
