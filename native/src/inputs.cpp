#include "inputs.h"

#include "error.h"

#include <algorithm>

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
  std::vector<ExprIndex> open{index};
  while (!open.empty()) {
    const ExprIndex next = open.back();
    open.pop_back();
    if (visited[next])
      continue;
    visited[next] = true;
    const Expr& expr = method.exprs[next];
    if (expr.op == ExprOp::symbol)
      symbols[static_cast<size_t>(expr.value)] = true;
    else if (expr.op != ExprOp::constant) {
      open.push_back(expr.a);
      open.push_back(expr.b);
    }
  }
}

} // namespace

std::string shape_text(const Method& method, const TensorSpec& spec) {
  const std::vector<std::string> names = texts(method.exprs, method.symbols);
  std::vector<bool> visited(method.exprs.size()), used(method.symbols.size());
  std::string text = "(";
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    text += cat(i > 0 ? ", " : "", names[spec.shape[i]]);
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

void read_symbols(const Method& method, std::span<const lapilli_tensor> inputs, SymbolValues& symbols) {
  if (inputs.size() != method.inputs.size()) {
    std::vector<std::string> names;
    for (const TensorSpec& spec : method.inputs)
      names.push_back(spec.name);
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" takes ", method.inputs.size(), " inputs",
         names.empty() ? std::string() : cat(" (", listed(names), ")"), ", and ", inputs.size(), " were given.");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const lapilli_tensor& given = inputs[i];
    const TensorSpec& spec = method.inputs[i];
    if (given.dtype != static_cast<uint32_t>(spec.dtype))
      fail(LAPILLI_INVALID_ARGUMENT, described(method, i), "; it was given as ",
           given.dtype <= static_cast<uint32_t>(DType::MAX) ? name_of(static_cast<DType>(given.dtype))
                                                            : "an unknown dtype",
           ".");
    if (given.rank != spec.shape.size())
      fail(LAPILLI_INVALID_ARGUMENT, described(method, i), "; it was given with ", given.rank, " dimensions, ",
           given_shape(given), ".");
    if (given.data == nullptr && given.size > 0)
      fail(LAPILLI_INVALID_ARGUMENT, described(method, i), "; its data pointer is null.");
  }
  symbols.count = method.symbols.size();
  for (size_t i = 0; i < symbols.count; ++i) {
    const Symbol& symbol = method.symbols[i];
    const int64_t value = inputs[symbol.input].shape[symbol.axis];
    if (value < symbol.min || (symbol.max >= 0 && value > symbol.max))
      fail(LAPILLI_INVALID_ARGUMENT, described(method, symbol.input), "; it was given with shape ",
           given_shape(inputs[symbol.input]), ".");
    symbols.values[i] = value;
  }
}

void check_shapes(const Method& method, std::span<const lapilli_tensor> inputs, std::span<const Run::Tensor> expected,
                  std::span<const int64_t> symbols) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const lapilli_tensor& given = inputs[i];
    if (!std::equal(expected[i].shape.begin(), expected[i].shape.end(), given.shape)) {
      std::vector<std::string> sizes;
      for (size_t s = 0; s < symbols.size(); ++s)
        sizes.push_back(cat(method.symbols[s].name, " = ", symbols[s]));
      fail(LAPILLI_INVALID_ARGUMENT, described(method, i), "; it was given with shape ", given_shape(given),
           sizes.empty() ? std::string() : cat(" (and the inputs say ", listed(sizes), ")"), ".");
    }
    if (given.size != expected[i].bytes)
      fail(LAPILLI_INVALID_ARGUMENT, described(method, i), ", which is ", expected[i].bytes, " bytes; ", given.size,
           " bytes were given. The data must be dense and row-major.");
  }
}

} // namespace lapilli
