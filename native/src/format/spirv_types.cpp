// What an instruction's operands and result must be of, and into which variable a pointer points.

#include "format/spirv_module.h"

#include <algorithm>

namespace lapilli::spirv {

namespace {

class Checker {
public:
  explicit Checker(Module& module) : m_(module) {}

  void run() {
    for (const Instruction& i : m_.instructions) {
      i_ = &i;
      given_ = m_.operands(i);
      instruction();
    }
    for (Function& function : m_.functions)
      for (uint32_t n = function.first; n <= function.last; ++n) {
        i_ = &m_.instructions[n];
        given_ = m_.operands(*i_);
        in_function(function);
      }
  }

private:
  void need(bool holds) const {
    if (!holds)
      m_.refuse(cat("has instruction ", i_->op, " at word ", i_->at, " with operands that do not fit"));
  }

  const Type& result() const { return m_.type(given_[0]); }
  uint32_t type_id(size_t operand) const { return m_.ids[given_[operand]].type; }
  const Type& operand(size_t n) const { return m_.type(type_id(n)); }

  // A scalar, or the components of a vector, or of a matrix.
  const Type& scalar(const Type& of) const {
    return of.op == op_type_vector || of.op == op_type_matrix_khr ? m_.type(of.element) : of;
  }
  static uint64_t count(const Type& of) { return of.op == op_type_vector ? of.count : 1; }
  bool is(const Type& of, uint32_t kind) const { return of.op != op_type_matrix_khr && scalar(of).op == kind; }
  bool is_int(const Type& of) const { return is(of, op_type_int); }
  bool is_float(const Type& of) const { return is(of, op_type_float) && !scalar(of).is_bfloat; }
  bool is_bits(const Type& of) const { return is_int(of) || is(of, op_type_float); }
  bool is_bool(const Type& of) const { return is(of, op_type_bool); }
  // Integers of one width, whatever their sign, and as many.
  bool alike(const Type& a, const Type& b) const {
    return is_int(a) && is_int(b) && scalar(a).width == scalar(b).width && count(a) == count(b);
  }
  static bool is_data(const Type& of) {
    return of.op != op_type_pointer && of.op != op_type_void && of.op != op_type_function && of.op != op_type_image &&
           of.op != op_type_runtime_array;
  }
  bool is_word(const Type& of) const { return of.op == op_type_int && of.width == 32; }

  // Types that are the same but for decorations and names (OpCopyLogical).
  bool same_shape(uint32_t a, uint32_t b, uint32_t depth = 0) const {
    if (a == b)
      return true;
    const Type &x = m_.type(a), &y = m_.type(b);
    if (x.op != y.op || depth > 32)
      return false;
    if (x.op == op_type_array)
      return x.count == y.count && same_shape(x.element, y.element, depth + 1);
    if (x.op != op_type_struct || x.members.size() != y.members.size())
      return false;
    for (size_t n = 0; n < x.members.size(); ++n)
      if (!same_shape(x.members[n], y.members[n], depth + 1))
        return false;
    return true;
  }

  // Follows one index into a type; `number`: its value where it is constant.
  uint32_t step(const Type& into, std::optional<uint64_t> number) const {
    switch (into.op) {
    case op_type_struct:
      need(number && *number < into.members.size());
      return into.members[static_cast<size_t>(*number)];
    case op_type_vector:
    case op_type_array:
      need(!number || *number < into.count);
      return into.element;
    case op_type_runtime_array:
      return into.element;
    case op_type_matrix_khr: // an invocation of a subgroup of up to 32 holds at least so many of 16 x 16
      need(number && *number < 8 && into.members[1] * into.members[2] >= 256);
      m_.takes_elements = true;
      return into.element;
    default:
      need(false);
      return 0;
    }
  }

  void instruction() {
    switch (i_->form->rule) {
    case Rule::none:
      return;
    case Rule::same:
      need(is_float(scalar(result())));
      for (size_t n = 2; n < given_.size(); ++n)
        need(type_id(n) == given_[0]);
      return;
    case Rule::integers:
      if (result().op == op_type_matrix_khr) {
        for (size_t n = 2; n < given_.size(); ++n)
          need(type_id(n) == given_[0]);
        return need(is_int(scalar(result())));
      }
      for (size_t n = 2; n < given_.size(); ++n)
        need(alike(result(), operand(n)));
      return;
    case Rule::shift:
      return need(alike(result(), operand(2)) && is_int(operand(3)) && count(operand(3)) == count(result()));
    case Rule::logical:
      need(is_bool(result()));
      for (size_t n = 2; n < given_.size(); ++n)
        need(type_id(n) == given_[0]);
      return;
    case Rule::compare_float:
      return need(is_bool(result()) && is_float(operand(2)) && type_id(2) == type_id(3) &&
                  count(result()) == count(operand(2)));
    case Rule::compare_int:
      return need(is_bool(result()) && alike(operand(2), operand(3)) && count(result()) == count(operand(2)));
    case Rule::test_float:
      return need(is_bool(result()) && is_float(operand(2)) && count(result()) == count(operand(2)));
    case Rule::convert:
      return convert();
    case Rule::bitcast:
      return need(is_bits(result()) && is_bits(operand(2)) &&
                  scalar(result()).width * count(result()) == scalar(operand(2)).width * count(operand(2)));
    case Rule::select:
      return need(is_bool(operand(2)) && type_id(3) == given_[0] && type_id(4) == given_[0] &&
                  (is_int(result()) || is_float(result()) || is_bool(result()) ||
                   (operand(2).op == op_type_bool && is_data(result()) && !result().is_bfloat)) &&
                  (operand(2).op == op_type_bool || count(operand(2)) == count(result())));
    case Rule::scale:
      return need(result().op == op_type_vector && is_float(result()) && type_id(2) == given_[0] &&
                  type_id(3) == result().element);
    case Rule::dot:
      return need(result().op == op_type_float && is_float(result()) && operand(2).op == op_type_vector &&
                  type_id(2) == type_id(3) && operand(2).element == given_[0]);
    case Rule::integer_dot:
      return integer_dot();
    case Rule::extended_pair: {
      const Type& pair = result();
      return need(pair.op == op_type_struct && pair.members.size() == 2 && pair.members[0] == pair.members[1] &&
                  alike(m_.type(pair.members[0]), operand(2)) && alike(operand(2), operand(3)));
    }
    case Rule::any_all:
      return need(result().op == op_type_bool && is_bool(operand(2)) && operand(2).op == op_type_vector);
    case Rule::shuffle: {
      need(result().op == op_type_vector && operand(2).op == op_type_vector && operand(3).op == op_type_vector &&
           operand(2).element == result().element && operand(3).element == result().element &&
           given_.size() - 4 == result().count);
      for (const uint32_t n : given_.subspan(4))
        need(n == UINT32_MAX || n < operand(2).count + operand(3).count);
      return;
    }
    case Rule::extract_dynamic:
      return need(operand(2).op == op_type_vector && operand(2).element == given_[0] && is_word(operand(3)));
    case Rule::insert_dynamic:
      return need(result().op == op_type_vector && type_id(2) == given_[0] && type_id(3) == result().element &&
                  is_word(operand(4)));
    case Rule::construct:
    case Rule::composite:
      return construct();
    case Rule::extract: {
      uint32_t at = type_id(2);
      need(given_.size() > 3);
      for (const uint32_t n : given_.subspan(3)) {
        need(m_.type(at).op != op_type_runtime_array);
        at = step(m_.type(at), n);
      }
      return need(at == given_[0]);
    }
    case Rule::insert: {
      uint32_t at = given_[0];
      need(type_id(3) == given_[0] && given_.size() > 4);
      for (const uint32_t n : given_.subspan(4)) {
        need(m_.type(at).op != op_type_runtime_array);
        at = step(m_.type(at), n);
      }
      return need(at == type_id(2));
    }
    case Rule::copy:
      return need(is_data(result()) && (i_->op == 400 ? same_shape(given_[0], type_id(2)) : type_id(2) == given_[0]));
    case Rule::undefined:
      return need(is_data(result()));
    case Rule::constant:
      return constant();
    case Rule::variable:
      return variable();
    case Rule::load: {
      const Type& pointer = operand(2);
      need(pointer.op == op_type_pointer && pointer.element == given_[0]);
      need(is_data(result()) || (result().op == op_type_image && pointer.storage == storage_uniform_constant));
      return;
    }
    case Rule::store: {
      const Type& pointer = operand(0);
      need(pointer.op == op_type_pointer && pointer.element == type_id(1) && is_data(operand(1)));
      return written(given_[0]);
    }
    case Rule::access:
      return access();
    case Rule::length: {
      const Type& pointer = operand(2);
      need(is_word(result()) && pointer.op == op_type_pointer && is_buffer(pointer.storage));
      const Type& block = m_.type(pointer.element);
      return need(block.op == op_type_struct && given_[3] + 1 == block.members.size() &&
                  m_.type(block.members.back()).op == op_type_runtime_array);
    }
    case Rule::fetch:
      return need(operand(2).op == op_type_image && result().op == op_type_vector && result().count == 4 &&
                  result().element == operand(2).element && is_word(operand(3)));
    case Rule::atomic_load:
      return atomic(2, given_[0]);
    case Rule::atomic_store:
      atomic(0, type_id(3));
      return written(given_[0]);
    case Rule::atomic:
      need(type_id(5) == given_[0]);
      atomic(2, given_[0]);
      return written(given_[2]);
    case Rule::atomic_compare:
      need(type_id(6) == given_[0] && type_id(7) == given_[0]);
      atomic(2, given_[0]);
      return written(given_[2]);
    case Rule::barrier:
      for (const uint32_t n : given_)
        need(is_word(m_.type_of(n)));
      return;
    case Rule::vote:
      return need(result().op == op_type_bool && is_word(operand(2)) && operand(3).op == op_type_bool);
    case Rule::elect:
      return need(result().op == op_type_bool && is_word(operand(2)));
    case Rule::ballot:
      return need(is_int(result()) && count(result()) == 4 && is_word(operand(2)) && operand(3).op == op_type_bool);
    case Rule::group_value:
      return need((is_int(result()) || is_float(result()) || is_bool(result())) && is_word(operand(2)) &&
                  type_id(3) == given_[0] && (given_.size() < 5 || is_word(operand(4))));
    case Rule::group_reduce:
      // Reduce, InclusiveScan, ExclusiveScan; clusters only for a power of two
      need((is_int(result()) || is_float(result())) && is_word(operand(2)) && given_[3] < 3 &&
           type_id(4) == given_[0] && given_.size() == 5);
      return need(is_float(result()) == (i_->op == 350 || i_->op == 352 || i_->op == 355 || i_->op == 358));
    case Rule::call:
      return; // when all functions are known
    case Rule::extended:
      return extended();
    case Rule::matrix_load:
      need(result().op == op_type_matrix_khr && matrix_memory(2, 3));
      return;
    case Rule::matrix_store:
      need(operand(1).op == op_type_matrix_khr && matrix_memory(0, 2));
      return written(given_[0]);
    case Rule::matrix_multiply: {
      const Type &a = operand(2), &b = operand(3), &c = operand(4);
      need(a.op == op_type_matrix_khr && b.op == op_type_matrix_khr && type_id(4) == given_[0] &&
           c.op == op_type_matrix_khr && scalar(a).is_bfloat == scalar(b).is_bfloat && !scalar(c).is_bfloat);
      return need(a.members[1] == c.members[1] && a.members[2] == b.members[1] && b.members[2] == c.members[2] &&
                  a.members[3] == 0 && b.members[3] == 1 && c.members[3] == 2);
    }
    case Rule::matrix_length:
      return need(is_word(result()) && m_.type(given_[2]).op == op_type_matrix_khr);
    }
  }

  void convert() {
    const Type &from = operand(2), &to = result();
    if (from.op == op_type_matrix_khr || to.op == op_type_matrix_khr)
      need(from.op == to.op && from.members == to.members);
    else
      need(count(from) == count(to));
    need(!scalar(from).is_bfloat && !scalar(to).is_bfloat);
    const uint32_t a = scalar(from).op, b = scalar(to).op;
    switch (i_->op) {
    case 109:
    case 110:
      return need(a == op_type_float && b == op_type_int);
    case 111:
    case 112:
      return need(a == op_type_int && b == op_type_float);
    case 113:
    case 114:
      return need(a == op_type_int && b == op_type_int && scalar(from).width != scalar(to).width);
    default:
      return need(a == op_type_float && b == op_type_float && scalar(from).width != scalar(to).width);
    }
  }

  void integer_dot() {
    const bool accumulates = i_->op >= 4453;
    const size_t operands = accumulates ? 5 : 4;
    need(result().op == op_type_int && is_int(operand(2)) && is_int(operand(3)) && alike(operand(2), operand(3)));
    if (operand(2).op == op_type_vector)
      need(given_.size() == operands && operand(2).count == 4 && scalar(operand(2)).width == 8);
    else
      need(given_.size() == operands + 1 && operand(2).width == 32 && given_.back() == 0); // four of 8 bits in a word
    need(result().width == 32 && (!accumulates || type_id(4) == given_[0]));
  }

  void construct() {
    const Type& made = result();
    const std::span<const uint32_t> parts = given_.subspan(2);
    switch (made.op) {
    case op_type_vector: {
      uint64_t components = 0;
      for (size_t n = 2; n < given_.size(); ++n) {
        const Type& part = operand(n);
        need(type_id(n) == made.element || (part.op == op_type_vector && part.element == made.element));
        components += count(part);
      }
      return need(components == made.count);
    }
    case op_type_array:
      need(parts.size() == made.count);
      for (size_t n = 2; n < given_.size(); ++n)
        need(type_id(n) == made.element);
      return;
    case op_type_struct:
      need(parts.size() == made.members.size());
      for (size_t n = 2; n < given_.size(); ++n)
        need(type_id(n) == made.members[n - 2]);
      return;
    case op_type_matrix_khr:
      return need(parts.size() == 1 && type_id(2) == made.element);
    default:
      need(false);
    }
  }

  void constant() {
    const Type& of = result();
    if (i_->op == op_constant)
      return need((of.op == op_type_int || of.op == op_type_float) && given_.size() - 2 == (of.width > 32 ? 2 : 1));
    need(of.op == op_type_bool);
  }

  void variable() {
    const Type& pointer = result();
    need(pointer.op == op_type_pointer && pointer.storage == given_[2]);
    need(m_.ids[given_[1]].block == UINT32_MAX ? given_[2] != storage_function : given_[2] == storage_function);
    if (given_.size() > 3)
      need((given_[2] == storage_function || given_[2] == storage_private) && type_id(3) == pointer.element);
    m_.ids[given_[1]].root = given_[1];
  }

  void access() {
    const Type& base = operand(2);
    const Type& to = result();
    need(base.op == op_type_pointer && to.op == op_type_pointer && base.storage == to.storage && given_.size() > 3);
    uint32_t at = base.element;
    for (const uint32_t index : given_.subspan(3)) {
      const Type& kind = m_.type_of(index);
      need(kind.op == op_type_int && kind.width >= 32);
      at = step(m_.type(at), m_.number(index));
    }
    need(at == to.element);
    m_.ids[given_[1]].root = m_.ids[given_[2]].root;
  }

  void atomic(size_t pointer, uint32_t value) {
    const Type& to = operand(pointer);
    need(to.op == op_type_pointer && (is_buffer(to.storage) || to.storage == storage_workgroup) &&
         to.element == value && m_.type(value).op == op_type_int && m_.type(value).width >= 32);
    for (const uint32_t id : given_.subspan(pointer + 1, 2))
      need(is_word(m_.type_of(id)));
  }

  bool matrix_memory(size_t pointer, size_t layout) const {
    const Type& to = operand(pointer);
    if (to.op != op_type_pointer || (!is_buffer(to.storage) && to.storage != storage_workgroup))
      return false;
    const Type& kind = scalar(m_.type(to.element));
    return (kind.op == op_type_int || kind.op == op_type_float) && is_word(operand(layout)) &&
           (given_.size() <= layout + 1 || m_.ids[given_[layout + 1]].role == Role::none ||
            operand(layout + 1).op == op_type_int);
  }

  // A pointer is stored through: the variable behind it may be written.
  void written(uint32_t pointer) {
    const uint32_t storage = m_.type_of(pointer).storage;
    need(is_buffer(storage) || storage == storage_workgroup || storage == storage_private ||
         storage == storage_function);
    if (is_buffer(storage)) {
      need(m_.ids[pointer].root != 0);
      m_.stored.insert(m_.ids[pointer].root);
    }
  }

  // GLSL.std.450, of which the kernels use what works on each component.
  void extended() {
    need(m_.ids[given_[2]].role == Role::import);
    const std::span<const uint32_t> values = given_.subspan(4);
    const auto all = [&](size_t wanted, auto fits) {
      need(values.size() == wanted);
      for (size_t n = 4; n < given_.size(); ++n)
        need(fits(n));
    };
    const auto as_result = [&](size_t n) { return type_id(n) == given_[0]; };
    const auto integer = [&](size_t n) { return alike(result(), operand(n)); };
    const uint32_t number = given_[3];
    const bool floats = is_float(result());
    // clang-format off
    switch (number) {
    case 1: case 2: case 3: case 4: case 6: case 8: case 9: case 10:            // Round .. FAbs, FSign, Floor, Ceil, Fract
    case 11: case 12: case 13: case 14: case 15: case 16: case 17: case 18:     // Radians .. Acos, Atan
    case 19: case 20: case 21: case 22: case 23: case 24:                       // Sinh .. Atanh
    case 27: case 28: case 29: case 30: case 31: case 32:                       // Exp, Log, Exp2, Log2, Sqrt, InverseSqrt
      need(floats);
      return all(1, as_result);
    case 25: case 26: case 37: case 40: case 79: case 80:                       // Atan2, Pow, FMin, FMax, NMin, NMax
      need(floats);
      return all(2, as_result);
    case 43: case 46: case 50: case 81:                                         // FClamp, FMix, Fma, NClamp
      need(floats);
      return all(3, as_result);
    case 5: case 7: case 73: case 74: case 75:                                  // SAbs, SSign, FindILsb, FindSMsb, FindUMsb
      return all(1, integer);
    case 38: case 39: case 41: case 42:                                         // UMin, SMin, UMax, SMax
      return all(2, integer);
    case 44: case 45:                                                           // UClamp, SClamp
      return all(3, integer);
    case 53:                                                                    // Ldexp
      need(floats && values.size() == 2 && as_result(4) && is_int(operand(5)) && count(operand(5)) == count(result()));
      return;
    case 58:                                                                    // PackHalf2x16
      return need(is_word(result()) && values.size() == 1 && is_float(operand(4)) && count(operand(4)) == 2 &&
                  scalar(operand(4)).width == 32);
    case 62:                                                                    // UnpackHalf2x16
      return need(floats && count(result()) == 2 && scalar(result()).width == 32 && values.size() == 1 &&
                  is_word(operand(4)));
    default:
      m_.refuse(cat("has extended instruction ", number, ", which Lapilli's kernels do not use"));
    }
    // clang-format on
  }

  void in_function(Function& function) {
    const Type& signature = m_.type(function.type);
    switch (i_->op) {
    case op_function:
      return need(is_data(result()) || result().op == op_type_void);
    case op_parameter:
      // A pointer that is handed over may point to variables of the caller only: others have a name everywhere.
      need(result().op != op_type_pointer || result().storage == storage_function);
      return;
    case op_variable:
      function.variables += m_.type(result().element).bytes;
      return need(m_.ids[given_[1]].block == 0);
    case op_call: {
      const auto called = m_.function_index.find(given_[2]);
      need(called != m_.function_index.end());
      const Type& wanted = m_.type(m_.functions[called->second].type);
      need(wanted.element == given_[0] && wanted.members.size() == given_.size() - 3);
      for (size_t n = 3; n < given_.size(); ++n)
        need(type_id(n) == wanted.members[n - 3]);
      function.calls.push_back(given_[2]);
      return;
    }
    case op_return:
      return need(m_.type(signature.element).op == op_type_void);
    case op_return_value:
      return need(m_.ids[given_[0]].type == signature.element);
    case op_phi:
      need(is_data(result()));
      for (size_t n = 2; n < given_.size(); n += 2)
        need((m_.ids[given_[n]].role == Role::value || m_.ids[given_[n]].role == Role::constant) &&
             type_id(n) == given_[0]);
      return;
    case op_branch_conditional:
      return need(m_.type_of(given_[0]).op == op_type_bool && (given_.size() == 3 || given_.size() == 5));
    case op_switch:
      return need(is_word(m_.type_of(given_[0])));
    default:
      return;
    }
  }

  Module& m_;
  const Instruction* i_ = nullptr;
  std::span<const uint32_t> given_;
};

} // namespace

void check_types(Module& module) { Checker(module).run(); }

} // namespace lapilli::spirv
