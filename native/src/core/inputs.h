// Checking what a caller gives against what a method takes.
#pragma once

#include "core/run.h"
#include "format/file_limits.h"

#include <functional>

namespace lapilli {

struct SymbolValues {
  std::array<int64_t, max_symbols> values;
  size_t count = 0;
  std::span<const int64_t> used() const { return std::span(values).first(count); }
};

// What a caller on the host gives a run: tensors, and the values of the symbols that these do not show.
struct Given {
  std::span<const lapilli_tensor> inputs;
  std::span<const int64_t> sizes = {};
};

// Checks count, dtypes and ranks, and reads the values of the symbols, which must lie within their bounds.
// Throws INVALID_ARGUMENT with the name of the input, what was given and what is accepted.
void read_symbols(const Method& method, const Given& given, SymbolValues& symbols);

// Checks every dimension and the number of bytes of input `index` against what a run for these symbols takes.
void check_tensor(const Method& method, size_t index, const lapilli_tensor& given, std::span<const int64_t> shape,
                  uint64_t bytes, std::span<const int64_t> symbols);

// Checks every dimension and the number of bytes against the tensors of a run that is prepared for these symbols, and
// that integers fit into 32 bits.
void check_tensors(const Method& method, std::span<const lapilli_tensor> inputs, std::span<const Run::Tensor> expected,
                   std::span<const int64_t> symbols);

// Checks that int64 values fit into the 32 bits in which kernels compute integers; `what` begins the message.
void check_integers(Bytes values, int64_t limit, const std::function<std::string()>& what);

// "(N, 3, 224, 224) with N in 1..16".
std::string shape_text(const Method& method, const TensorSpec& spec);

} // namespace lapilli
