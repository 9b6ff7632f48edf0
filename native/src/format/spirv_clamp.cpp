#include "format/spirv_clamp.h"

#include "format/spirv_module.h"

#include <map>

namespace lapilli {

namespace {

using namespace spirv;

constexpr uint32_t extended_minimum = 38; // UMin of GLSL.std.450

class Clamp {
public:
  explicit Clamp(const std::vector<uint32_t>& code) : in_(code), next_(code[3]), types_(next_), constants_(next_) {}

  std::vector<uint32_t> run() {
    learn();
    std::vector<uint32_t> functions; // with the minimums; the constants that they need are known afterwards
    each([&](uint32_t op, size_t at, std::span<const uint32_t> given, bool inside) {
      if (inside)
        instruction(functions, op, at, given);
    });
    if (limits_.empty())
      return in_;
    std::vector<uint32_t> out;
    bool imported = import_ != 0, begun = false;
    out.assign(in_.begin(), in_.begin() + 5);
    if (!imported)
      import_ = next_++;
    each([&](uint32_t op, size_t at, std::span<const uint32_t> given, bool inside) {
      if (!imported && op == op_memory_model) {
        out.insert(out.end(), {6u << 16 | op_import, import_, 0x4c534c47, 0x6474732e, 0x3035342e, 0}); // "GLSL.std.450"
        imported = true;
      }
      if (!inside)
        out.insert(out.end(), in_.begin() + static_cast<ptrdiff_t>(at),
                   in_.begin() + static_cast<ptrdiff_t>(at + given.size() + 1));
      else if (!std::exchange(begun, true))
        for (const auto& [key, id] : limits_)
          constant(out, key.first, id, key.second);
    });
    for (const size_t place : imports_)
      functions[place] = import_;
    out.insert(out.end(), functions.begin(), functions.end());
    out[3] = next_;
    return out;
  }

private:
  struct Known {
    uint32_t op = 0, element = 0, width = 0, storage = 0, type = 0;
    std::span<const uint32_t> members{};
    uint64_t count = 0;
  };

  template <class F> void each(F&& f) {
    bool inside = false;
    for (size_t at = 5; at < in_.size(); at += in_[at] >> 16) {
      const uint32_t op = in_[at] & 0xffff;
      inside = inside || op == op_function;
      f(op, at, std::span(in_).subspan(at + 1, (in_[at] >> 16) - 1), inside);
    }
  }

  // Types, the types of values, and integer constants.
  void learn() {
    each([&](uint32_t op, size_t, std::span<const uint32_t> given, bool) {
      if (op == op_import)
        import_ = given[0];
      else if (op == op_type_int)
        types_[given[0]] = {.op = op, .width = given[1]};
      else if (op == op_type_vector)
        types_[given[0]] = {.op = op, .element = given[1], .count = given[2]};
      else if (op == op_type_array)
        types_[given[0]] = {.op = op, .element = given[1], .count = constants_[given[2]].value_or(0)};
      else if (op == op_type_runtime_array)
        types_[given[0]] = {.op = op, .element = given[1]};
      else if (op == op_type_struct)
        types_[given[0]] = {.op = op, .members = given.subspan(1)};
      else if (op == op_type_pointer)
        types_[given[0]] = {.op = op, .element = given[2], .storage = given[1]};
      else if (const Form* form = find_form(op); form->operands[0] == 'T') {
        types_[given[1]].type = given[0];
        if (op == op_constant && types_[given[0]].op == op_type_int)
          constants_[given[1]] = given.size() > 3 ? given[2] | uint64_t{given[3]} << 32 : given[2];
      }
    });
  }

  void instruction(std::vector<uint32_t>& out, uint32_t op, size_t at, std::span<const uint32_t> given) {
    std::vector<uint32_t> words(in_.begin() + static_cast<ptrdiff_t>(at),
                                in_.begin() + static_cast<ptrdiff_t>(at + given.size() + 1));
    if (op == op_access_chain || op == op_access_chain + 1) {
      const Known& pointer = types_[types_[given[2]].type];
      if (pointer.storage == storage_workgroup || pointer.storage == storage_private ||
          pointer.storage == storage_function)
        chain(out, words, pointer.element);
    } else if (op == 77 || op == 78) { // OpVectorExtractDynamic, OpVectorInsertDynamic
      uint32_t& index = words[op == 77 ? 4 : 5];
      index = limited(out, index, types_[types_[given[2]].type].count);
    }
    out.insert(out.end(), words.begin(), words.end());
  }

  void chain(std::vector<uint32_t>& out, std::vector<uint32_t>& words, uint32_t type) {
    for (size_t n = 4; n < words.size(); ++n) {
      const Known& into = types_[type];
      if (into.op == op_type_struct) {
        type = into.members[static_cast<size_t>(*constants_[words[n]])];
        continue;
      }
      words[n] = limited(out, words[n], into.count);
      type = into.element;
    }
  }

  // The smaller one of an index and the last place; constants are right already.
  uint32_t limited(std::vector<uint32_t>& out, uint32_t index, uint64_t count) {
    if (constants_[index] || count == 0)
      return index;
    const uint32_t type = types_[index].type;
    uint32_t& last = limits_[{type, count - 1}];
    if (last == 0)
      last = next_++;
    const uint32_t result = next_++;
    out.insert(out.end(), {7u << 16 | op_extended, type, result});
    imports_.push_back(out.size());
    out.insert(out.end(), {0, extended_minimum, index, last});
    return result;
  }

  void constant(std::vector<uint32_t>& out, uint32_t type, uint32_t id, uint64_t value) const {
    if (types_[type].width == 64)
      out.insert(out.end(),
                 {5u << 16 | op_constant, type, id, static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)});
    else
      out.insert(out.end(), {4u << 16 | op_constant, type, id, static_cast<uint32_t>(value)});
  }

  const std::vector<uint32_t>& in_;
  uint32_t next_;            // the first id that is free
  std::vector<Known> types_; // of ids: types, and the types of values
  std::vector<std::optional<uint64_t>> constants_;
  uint32_t import_ = 0;
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> limits_; // type and value of a constant to be added
  std::vector<size_t> imports_;                              // words that name the import
};

} // namespace

std::vector<uint32_t> clamp_indices(const std::vector<uint32_t>& code) { return Clamp(code).run(); }

} // namespace lapilli
