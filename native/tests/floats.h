// Vectors of floats as tensors of the C ABI.
#pragma once

#include "lapilli.h"

#include <algorithm>
#include <cstdint>
#include <vector>

using Floats = std::vector<float>;

// `values` with a shape; of an output, none: the player fills it in.
inline lapilli_tensor tensor(Floats& values, const std::vector<int64_t>& shape) {
  lapilli_tensor result{};
  result.data = values.data();
  result.size = values.size() * sizeof(float);
  result.rank = static_cast<uint32_t>(shape.size());
  std::ranges::copy(shape, result.shape);
  result.dtype = LAPILLI_FLOAT32;
  return result;
}
