#include "format/expr.h"

#include "base/error.h"
#include "base/text.h"

#include <algorithm>
#include <limits>

namespace lapilli {

namespace {
constexpr int64_t lowest = std::numeric_limits<int64_t>::min();
constexpr int64_t highest = std::numeric_limits<int64_t>::max();
} // namespace

bool add(int64_t a, int64_t b, int64_t& result) {
  if (b > 0 ? a > highest - b : a < lowest - b)
    return false;
  result = a + b;
  return true;
}

bool subtract(int64_t a, int64_t b, int64_t& result) {
  if (b > 0 ? a < lowest + b : a > highest + b)
    return false;
  result = a - b;
  return true;
}

bool multiply(int64_t a, int64_t b, int64_t& result) {
  if (a != 0 && b != 0) {
    if ((a == -1 && b == lowest) || (b == -1 && a == lowest))
      return false;
    if (a > 0 ? (b > 0 ? a > highest / b : (b != -1 && b < lowest / a)) : (b > 0 ? a < lowest / b : b < highest / a))
      return false;
  }
  result = a * b;
  return true;
}

bool floor_divide(int64_t a, int64_t b, int64_t& result) {
  if (b == 0 || (a == lowest && b == -1))
    return false;
  result = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
  return true;
}

bool floor_modulo(int64_t a, int64_t b, int64_t& result) {
  if (b == 0 || (a == lowest && b == -1))
    return false;
  const int64_t rest = a % b;
  result = rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  return true;
}

bool tensor_bytes(std::span<const int64_t> shape, DType dtype, uint64_t& bytes) {
  int64_t product = size_of(dtype);
  for (const int64_t size : shape)
    if (size < 0 || !multiply(product, size, product))
      return false;
  bytes = static_cast<uint64_t>(product);
  return true;
}

Values::Values(std::span<const Expr> pool, std::span<const int64_t> symbols)
    : values_(pool.size()), valid_(pool.size()) {
  for (size_t i = 0; i < pool.size(); ++i) {
    const Expr& expr = pool[i];
    if (expr.op == ExprOp::constant) {
      values_[i] = expr.value;
      valid_[i] = true;
      continue;
    }
    if (expr.op == ExprOp::symbol) {
      values_[i] = symbols[static_cast<size_t>(expr.value)];
      valid_[i] = true;
      continue;
    }
    if (!valid_[expr.a] || !valid_[expr.b])
      continue;
    const int64_t a = values_[expr.a];
    const int64_t b = values_[expr.b];
    int64_t result = 0;
    bool fits = true;
    switch (expr.op) {
    case ExprOp::add:
      fits = add(a, b, result);
      break;
    case ExprOp::sub:
      fits = subtract(a, b, result);
      break;
    case ExprOp::mul:
      fits = multiply(a, b, result);
      break;
    case ExprOp::floordiv:
      fits = floor_divide(a, b, result);
      break;
    case ExprOp::mod:
      fits = floor_modulo(a, b, result);
      break;
    case ExprOp::min:
      result = std::min(a, b);
      break;
    case ExprOp::max:
      result = std::max(a, b);
      break;
    case ExprOp::constant:
    case ExprOp::symbol:
      break;
    }
    values_[i] = result;
    valid_[i] = fits;
  }
}

int64_t Values::operator[](ExprIndex index) const {
  if (!valid_[index])
    invalid_file(
        "A size of the program cannot be computed for these inputs: expression ", index,
        " overflows or divides by zero. Compile the model again with narrower bounds of its dynamic dimensions.");
  return values_[index];
}

uint64_t Values::or_zero(ExprIndex index) const {
  return valid_[index] ? static_cast<uint64_t>(std::max<int64_t>(values_[index], 0)) : 0;
}

uint64_t Values::size(ExprIndex index, const char* what) const {
  const int64_t value = (*this)[index];
  check_file(value >= 0, "The program is damaged: ", what, " comes out as ", value, " for these inputs.");
  return static_cast<uint64_t>(value);
}

std::vector<bool> symbolic(std::span<const Expr> pool) {
  std::vector<bool> result(pool.size());
  for (size_t i = 0; i < pool.size(); ++i) {
    const Expr& expr = pool[i];
    if (expr.op == ExprOp::symbol)
      result[i] = true;
    else if (expr.op != ExprOp::constant)
      result[i] = result[expr.a] || result[expr.b];
  }
  return result;
}

namespace {

constexpr uint32_t longest_part = 200;

// What stands before, between and after the operands of an operator.
struct Notation {
  std::string_view before, between, after;
};

Notation notation(ExprOp op) {
  switch (op) {
  case ExprOp::add:
    return {"(", " + ", ")"};
  case ExprOp::sub:
    return {"(", " - ", ")"};
  case ExprOp::mul:
    return {"(", " * ", ")"};
  case ExprOp::floordiv:
    return {"(", " // ", ")"};
  case ExprOp::mod:
    return {"(", " % ", ")"};
  case ExprOp::min:
    return {"min(", ", ", ")"};
  case ExprOp::max:
    return {"max(", ", ", ")"};
  case ExprOp::constant:
  case ExprOp::symbol:
    break;
  }
  return {};
}

} // namespace

// Only lengths are worked out for all: the texts themselves could take many times the memory of the pool.
Texts::Texts(std::span<const Expr> pool, std::span<const Symbol> symbols)
    : pool_(pool), symbols_(symbols), long_(pool.size()) {
  std::vector<uint8_t> lengths(pool.size()); // of those that are not long
  static_assert(longest_part < 256);
  const auto length = [&](ExprIndex index) -> size_t {
    return long_[index] ? std::to_string(index).size() + 1 : lengths[index];
  };
  for (size_t i = 0; i < pool.size(); ++i) {
    const Expr& expr = pool[i];
    size_t size = 0;
    if (expr.op == ExprOp::constant)
      size = std::to_string(expr.value).size();
    else if (expr.op == ExprOp::symbol)
      size = symbols[static_cast<size_t>(expr.value)].name.size();
    else {
      const Notation words = notation(expr.op);
      size = words.before.size() + words.between.size() + words.after.size() + length(expr.a) + length(expr.b);
    }
    long_[i] = size > longest_part;
    lengths[i] = static_cast<uint8_t>(std::min<size_t>(size, 255));
  }
}

std::string Texts::operator[](ExprIndex index) const {
  std::string out;
  write(index, out);
  return out;
}

void Texts::part(ExprIndex index, std::string& out) const {
  if (long_[index])
    append(out, cat("e", index));
  else
    write(index, out);
}

// What is not long is not nested deeply either.
void Texts::write(ExprIndex index, std::string& out) const {
  const Expr& expr = pool_[index];
  if (expr.op == ExprOp::constant)
    return append(out, expr.value);
  if (expr.op == ExprOp::symbol)
    return append(out, symbols_[static_cast<size_t>(expr.value)].name);
  const Notation words = notation(expr.op);
  append(out, words.before);
  part(expr.a, out);
  append(out, words.between);
  part(expr.b, out);
  append(out, words.after);
}

} // namespace lapilli
