// Integer expressions over the sizes of dynamic dimensions.
#pragma once

#include "format/model.h"

#include <span>

namespace lapilli {

// The value of every expression of a pool. One that overflows or divides by zero has no value: using it is an error,
// but only using it, so that an expression that another plan needs does no harm.
class Values {
public:
  Values() = default;
  Values(std::span<const Expr> pool, std::span<const int64_t> symbols);

  int64_t operator[](ExprIndex index) const;
  // For what is only an estimate: 0 where there is no value.
  uint64_t or_zero(ExprIndex index) const;
  // A size, offset or count: not negative.
  uint64_t size(ExprIndex index, const char* what) const;

private:
  std::vector<int64_t> values_;
  std::vector<bool> valid_;
};

// For every expression, whether it depends on a symbol.
std::vector<bool> symbolic(std::span<const Expr> pool);

// Expressions as text, "3", "N", "(N * 3)"; long ones refer to others as "e17".
class Texts {
public:
  Texts() = default;
  Texts(std::span<const Expr> pool, std::span<const Symbol> symbols);

  std::string operator[](ExprIndex index) const;

private:
  void write(ExprIndex index, std::string& out) const;
  void part(ExprIndex index, std::string& out) const;

  std::span<const Expr> pool_;
  std::span<const Symbol> symbols_;
  std::vector<bool> long_; // too long to be a part of another
};

// Arithmetic that says when the result does not fit. `floor_divide` and `floor_modulo` round like Python's // and %.
bool add(int64_t a, int64_t b, int64_t& result);
bool subtract(int64_t a, int64_t b, int64_t& result);
bool multiply(int64_t a, int64_t b, int64_t& result);
bool floor_divide(int64_t a, int64_t b, int64_t& result);
bool floor_modulo(int64_t a, int64_t b, int64_t& result);

// Bytes of a tensor; nothing when the product does not fit into 63 bits or a size is negative.
bool tensor_bytes(std::span<const int64_t> shape, DType dtype, uint64_t& bytes);

} // namespace lapilli
