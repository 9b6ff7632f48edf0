// What is in a program, as JSON for people and tools.
#pragma once

#include "format/model.h"

namespace lapilli {

// Throws INVALID_FILE where it would be longer than `longest` bytes.
std::string describe(const Model& model, uint64_t longest);

// Flag names of Requirements: features and subgroup operations.
std::vector<std::string> feature_names(uint64_t features);
std::vector<std::string> subgroup_names(uint32_t operations);

} // namespace lapilli
