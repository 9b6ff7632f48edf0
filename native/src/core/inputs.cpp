#include "core/inputs.h"

#include "base/error.h"
#include "core/launch.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

namespace {

std::string given_shape(const lapilli_tensor& tensor) {
  std::string text = "(";
  for (uint32_t i = 0; i < std::min(tensor.rank, max_rank); ++i)
    text += cat(i > 0 ? ", " : "", tensor.shape[i]);
  return text + (tensor.rank == 1 ? ",)" : ")");
}

std::string described(const Method& method, size_t index) {
  const TensorSpec& spec = method.inputs[index];
  return cat("Input ", index, spec.name.empty() ? std::string() : cat(" (\"", spec.name, "\")"), " must be ",
             name_of(spec.dtype), " of shape ", shape_text(method, spec));
}

void collect_symbols(const Method& method, ExprIndex index, std::vector<bool>& visited, std::vector<bool>& symbols) {
  std::vector<ExprIndex> pending{index};
  while (!pending.empty()) {
    const ExprIndex next = pending.back();
    pending.pop_back();
    if (visited[next])
      continue;
    visited[next] = true;
    const Expr& expr = method.exprs[next];
    if (expr.op == ExprOp::symbol)
      symbols[static_cast<size_t>(expr.value)] = true;
    else if (expr.op != ExprOp::constant) {
      pending.push_back(expr.a);
      pending.push_back(expr.b);
    }
  }
}

// Checks dtype and rank.
void check_form(const Method& method, size_t index, const lapilli_tensor& given) {
  const TensorSpec& spec = method.inputs[index];
  if (given.dtype != static_cast<uint32_t>(spec.dtype))
    fail(LAPILLI_INVALID_ARGUMENT, described(method, index), "; it was given as ",
         given.dtype <= static_cast<uint32_t>(DType::MAX) ? name_of(static_cast<DType>(given.dtype))
                                                          : "an unknown dtype",
         ".");
  if (given.rank != spec.shape.size())
    fail(LAPILLI_INVALID_ARGUMENT, described(method, index), "; it was given with ", given.rank, " dimensions, ",
         given_shape(given), ".");
  if (given.data == nullptr && given.size > 0)
    fail(LAPILLI_INVALID_ARGUMENT, described(method, index), "; its data pointer is null.");
}

void check_sizes(const Method& method, size_t count) {
  std::vector<std::string> names;
  for (const Symbol& symbol : method.symbols)
    if (symbol.given)
      names.push_back(symbol.name);
  if (names.size() != count)
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" must be given ",
         names.empty() ? std::string("no sizes") : cat("the sizes ", listed(names), ", which its inputs do not show"),
         "; ", count, " were given. lapilli_submit_sized takes them.");
}

// The value that an input shows.
int64_t read(const Method& method, const Symbol& symbol, std::span<const lapilli_tensor> inputs) {
  const lapilli_tensor& given = inputs[symbol.input];
  const auto refuse = [&](const auto&... why) {
    fail(LAPILLI_INVALID_ARGUMENT, described(method, symbol.input), "; it was given with shape ", given_shape(given),
         ", ", why..., ".");
  };
  int64_t multiple = 0, value = 0, rest = 0;
  if (!subtract(given.shape[symbol.axis], symbol.offset, multiple))
    refuse("whose size along axis ", symbol.axis, " does not fit");
  floor_divide(multiple, symbol.factor, value);
  floor_modulo(multiple, symbol.factor, rest);
  if (rest != 0)
    refuse("and no whole ", symbol.name, " gives ", given.shape[symbol.axis]);
  if (value < symbol.min || (symbol.max >= 0 && value > symbol.max))
    refuse("which is ", symbol.name, " = ", value);
  return value;
}

} // namespace

std::string shape_text(const Method& method, const TensorSpec& spec) {
  const Texts texts(method.exprs, method.symbols);
  std::vector<bool> visited(method.exprs.size()), used(method.symbols.size());
  std::string text = "(";
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    text += cat(i > 0 ? ", " : "", texts[spec.shape[i]]);
    collect_symbols(method, spec.shape[i], visited, used);
  }
  text += spec.shape.size() == 1 ? ",)" : ")";
  std::vector<std::string> bounds;
  for (size_t i = 0; i < used.size(); ++i)
    if (used[i]) {
      const Symbol& symbol = method.symbols[i];
      bounds.push_back(symbol.max < 0 ? cat(symbol.name, " at least ", symbol.min)
                                      : cat(symbol.name, " in ", symbol.min, "..", symbol.max));
    }
  return bounds.empty() ? text : cat(text, " with ", listed(bounds));
}

void read_symbols(const Method& method, const Given& given, SymbolValues& symbols) {
  const std::span<const lapilli_tensor> inputs = given.inputs;
  if (inputs.size() != method.inputs.size()) {
    std::vector<std::string> names;
    for (const TensorSpec& spec : method.inputs)
      names.push_back(spec.name);
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" takes ", method.inputs.size(), " inputs",
         names.empty() ? std::string() : cat(" (", listed(names), ")"), ", and ", inputs.size(), " were given.");
  }
  for (size_t i = 0; i < inputs.size(); ++i)
    check_form(method, i, inputs[i]);
  check_sizes(method, given.sizes.size());
  symbols.count = method.symbols.size();
  for (size_t i = 0, next = 0; i < symbols.count; ++i)
    symbols.values[i] = method.symbols[i].given ? given.sizes[next++] : read(method, method.symbols[i], inputs);
  check_symbols(method, symbols.used());
}

void check_tensor(const Method& method, size_t index, const lapilli_tensor& given, std::span<const int64_t> shape,
                  uint64_t bytes, std::span<const int64_t> symbols) {
  if (!std::equal(shape.begin(), shape.end(), given.shape)) {
    std::vector<std::string> sizes;
    for (size_t s = 0; s < symbols.size(); ++s)
      sizes.push_back(cat(method.symbols[s].name, " = ", symbols[s]));
    fail(LAPILLI_INVALID_ARGUMENT, described(method, index), "; it was given with shape ", given_shape(given),
         sizes.empty() ? std::string() : cat(" (and the inputs say ", listed(sizes), ")"), ".");
  }
  if (given.size != bytes)
    fail(LAPILLI_INVALID_ARGUMENT, described(method, index), ", which is ", bytes, " bytes; ", given.size,
         " bytes were given. The data must be dense and row-major.");
}

void check_tensors(const Method& method, std::span<const lapilli_tensor> inputs, std::span<const Run::Tensor> expected,
                   std::span<const int64_t> symbols) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const lapilli_tensor& given = inputs[i];
    check_tensor(method, i, given, expected[i].shape, expected[i].bytes, symbols);
    if (method.inputs[i].dtype == DType::int64)
      check_integers({static_cast<const std::byte*>(given.data), static_cast<size_t>(given.size)}, method.integer_limit,
                     [&] { return described(method, i); });
  }
}

void check_integers(Bytes values, int64_t limit, const std::function<std::string()>& what) {
  const int64_t least = limit > 0 ? -limit : INT32_MIN, most = limit > 0 ? limit : INT32_MAX;
  const uint64_t room = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
  const auto at = [&](size_t i) {
    int64_t value; // not necessarily aligned
    std::memcpy(&value, values.data() + i * sizeof value, sizeof value);
    return value;
  };
  const size_t count = values.size() / sizeof(int64_t);
  const auto is_beyond = [&](int64_t value) {
    return static_cast<uint64_t>(value) - static_cast<uint64_t>(least) > room;
  };
  bool beyond = false;
  for (size_t i = 0; i < count; ++i)
    beyond |= is_beyond(at(i)); // without a branch: as fast as memory
  for (size_t i = 0; beyond && i < count; ++i)
    if (is_beyond(at(i)))
      fail(LAPILLI_INVALID_ARGUMENT, what(), "; element ", i, " is ", at(i), ", and int64 values ",
           limit > 0 ? "and what is computed from them " : "",
           "must fit into the 32 bits in which kernels compute integers (", least, "..", most, ").");
}

} // namespace lapilli
