#include "spirv.h"

#include "error.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>

namespace lapilli {

namespace {

// The SPIR-V specification's numbers (https://registry.khronos.org/SPIR-V/specs/unified1/SPIRV.html).
constexpr uint32_t magic = 0x07230203;
enum Op : uint32_t {
  op_entry_point = 15,
  op_execution_mode = 16,
  op_capability = 17,
  op_type_bool = 20,
  op_type_int = 21,
  op_type_float = 22,
  op_type_vector = 23,
  op_type_matrix = 24,
  op_type_array = 28,
  op_type_struct = 30,
  op_type_pointer = 32,
  op_constant = 43,
  op_spec_constant = 50,
  op_variable = 59,
  op_decorate = 71,
  op_member_decorate = 72,
  op_execution_mode_id = 331,
};
constexpr uint32_t model_compute = 5;
constexpr uint32_t mode_local_size = 17;
constexpr uint32_t mode_local_size_id = 38;
constexpr uint32_t decoration_array_stride = 6;
constexpr uint32_t decoration_matrix_stride = 7;
constexpr uint32_t decoration_binding = 33;
constexpr uint32_t decoration_set = 34;
constexpr uint32_t decoration_offset = 35;
enum Storage : uint32_t {
  storage_uniform_constant = 0,
  storage_input = 1,
  storage_uniform = 2,
  storage_workgroup = 4,
  storage_private = 6,
  storage_function = 7,
  storage_push_constant = 9,
  storage_buffer = 12,
};

struct Type {
  uint32_t op = 0;
  std::vector<uint32_t> operands;
};

struct Decorations {
  std::optional<uint32_t> set, binding, array_stride;
  std::vector<std::pair<uint32_t, uint32_t>> offsets;        // member, bytes
  std::vector<std::pair<uint32_t, uint32_t>> matrix_strides; // member, bytes
};

class Walk {
public:
  explicit Walk(Kernel& kernel) : kernel_(kernel) {}

  void run() {
    header();
    instructions();
    conclude();
  }

private:
  template <class... Parts> void check(bool holds, const Parts&... parts) const {
    if (!holds)
      invalid_file("The program is damaged: the SPIR-V code of kernel \"", kernel_.name, "\" ", cat(parts...), ".");
  }

  void header() {
    const size_t bytes = kernel_.code.size();
    check(bytes % 4 == 0 && bytes >= 20, "has ", bytes, " bytes");
    words_.resize(bytes / 4);
    std::memcpy(words_.data(), kernel_.code.data(), bytes);
    check(words_[0] == magic, "does not begin with SPIR-V's magic number");
    kernel_.spirv_version = words_[1];
    check(words_[1] >= 0x00010000 && words_[1] <= 0x00010600 && (words_[1] & 0xff) == 0, "has unknown version ",
          words_[1]);
    check(words_[3] > 0 && words_[3] <= 0x3fffff, "has bound ", words_[3]);
    bound_ = words_[3];
  }

  uint32_t id(uint32_t value) const {
    check(value > 0 && value < bound_, "names id ", value, " beyond its bound ", bound_);
    return value;
  }

  void instructions() {
    size_t at = 5;
    while (at < words_.size()) {
      const uint32_t length = words_[at] >> 16;
      check(length > 0 && length <= words_.size() - at, "has an instruction of ", length, " words at word ", at);
      instruction(words_[at] & 0xffff, std::span(words_).subspan(at + 1, length - 1));
      at += length;
    }
  }

  void instruction(uint32_t op, std::span<const uint32_t> operands) {
    const auto need = [&](size_t count) {
      check(operands.size() >= count, "has instruction ", op, " with ", operands.size(), " operands");
    };
    switch (op) {
    case op_capability:
      need(1);
      kernel_.capabilities.push_back(operands[0]);
      break;
    case op_entry_point: {
      need(3);
      check(operands[0] == model_compute, "has an entry point that is not a compute shader");
      check(kernel_.entry_point.empty(), "has more than one entry point");
      entry_ = id(operands[1]);
      for (const uint32_t word : operands.subspan(2))
        for (uint32_t shift = 0; shift < 32; shift += 8) {
          const char c = static_cast<char>(word >> shift & 0xff);
          if (c == '\0') {
            check(!kernel_.entry_point.empty(), "has an entry point without a name");
            return;
          }
          kernel_.entry_point += c;
        }
      check(false, "has an entry point whose name does not end");
      break;
    }
    case op_execution_mode:
    case op_execution_mode_id:
      need(2);
      if (operands[1] == mode_local_size || operands[1] == mode_local_size_id) {
        need(5);
        local_is_id_ = operands[1] == mode_local_size_id;
        local_ = {operands[2], operands[3], operands[4]};
        local_entry_ = operands[0];
      }
      break;
    case op_type_bool:
    case op_type_int:
    case op_type_float:
    case op_type_vector:
    case op_type_matrix:
    case op_type_array:
    case op_type_struct:
    case op_type_pointer:
      need(1);
      types_[id(operands[0])] = {op, {operands.begin() + 1, operands.end()}};
      break;
    case op_constant:
    case op_spec_constant:
      need(3);
      constants_[id(operands[1])] = operands[2];
      break;
    case op_variable:
      need(3);
      variables_.push_back({id(operands[0]), id(operands[1]), operands[2]});
      break;
    case op_decorate:
      need(2);
      if (operands[1] == decoration_set || operands[1] == decoration_binding ||
          operands[1] == decoration_array_stride) {
        need(3);
        Decorations& found = decorations_[id(operands[0])];
        (operands[1] == decoration_set       ? found.set
         : operands[1] == decoration_binding ? found.binding
                                             : found.array_stride) = operands[2];
      }
      break;
    case op_member_decorate:
      need(3);
      if (operands[2] == decoration_offset || operands[2] == decoration_matrix_stride) {
        need(4);
        Decorations& found = decorations_[id(operands[0])];
        (operands[2] == decoration_offset ? found.offsets : found.matrix_strides)
            .emplace_back(operands[1], operands[3]);
      }
      break;
    default:
      break;
    }
  }

  const Type& type(uint32_t index) const {
    const auto found = types_.find(index);
    check(found != types_.end(), "uses id ", index, " as a type, and it is none that can be in a push constant");
    return found->second;
  }

  // Bytes of a value of explicit layout. Depth and steps are limited, because a damaged module may contain a cycle.
  uint64_t bytes(uint32_t index, uint32_t depth) {
    check(depth < 16 && ++steps_ < 4096, "has push constants that are nested too deeply");
    const Type& found = type(index);
    const auto need = [&](size_t count) { check(found.operands.size() >= count, "has a type without its operands"); };
    switch (found.op) {
    case op_type_int:
    case op_type_float:
      need(1);
      return found.operands[0] / 8;
    case op_type_vector:
      need(2);
      return bytes(found.operands[0], depth + 1) * std::min(found.operands[1], 16u);
    case op_type_pointer:
      return 8;
    case op_type_array: {
      need(2);
      const auto length = constants_.find(found.operands[1]);
      const auto decoration = decorations_.find(index);
      check(length != constants_.end() && decoration != decorations_.end() && decoration->second.array_stride,
            "has an array without length or stride in its push constants");
      return uint64_t{length->second} * *decoration->second.array_stride;
    }
    case op_type_struct: {
      const auto decoration = decorations_.find(index);
      uint64_t end = 0;
      if (decoration != decorations_.end())
        for (const auto& [member, offset] : decoration->second.offsets) {
          check(member < found.operands.size(), "decorates a member that does not exist");
          end = std::max(end, offset + bytes(found.operands[member], depth + 1));
        }
      return end;
    }
    default:
      check(false, "has a type ", found.op, " in its push constants that is not supported");
      return 0;
    }
  }

  void conclude() {
    check(!kernel_.entry_point.empty(), "has no entry point");
    check(local_entry_ == entry_, "does not say its work-group size");
    std::array<uint32_t, 3> local = local_;
    if (local_is_id_)
      for (uint32_t& size : local) {
        const auto found = constants_.find(size);
        check(found != constants_.end(), "has a work-group size that is not a constant");
        size = found->second;
      }
    check(local == kernel_.local, "has work groups of ", local[0], "x", local[1], "x", local[2],
          ", and the program says ", kernel_.local[0], "x", kernel_.local[1], "x", kernel_.local[2]);
    for (const Variable& variable : variables_)
      resource(variable);
    std::ranges::sort(kernel_.capabilities);
  }

  struct Variable {
    uint32_t type, id, storage;
  };

  void resource(const Variable& variable) {
    switch (variable.storage) {
    case storage_input:
    case storage_workgroup:
    case storage_private:
    case storage_function:
      return;
    case storage_uniform_constant: // a texel buffer
    case storage_uniform:          // SPIR-V before 1.3 wrote storage buffers so
    case storage_buffer: {
      const auto found = decorations_.find(variable.id);
      check(found != decorations_.end() && found->second.binding, "has a buffer without a binding");
      check(found->second.set.value_or(0) == 0 && *found->second.binding < kernel_.bindings, "reads binding ",
            *found->second.binding, " of set ", found->second.set.value_or(0), ", and the program gives ",
            kernel_.bindings, " bindings of set 0");
      const bool texel = kernel_.types[*found->second.binding] != BindingType::storage;
      check(texel == (variable.storage == storage_uniform_constant), "sees binding ", *found->second.binding,
            " as another type of buffer than the program says");
      return;
    }
    case storage_push_constant: {
      const Type& pointer = type(variable.type);
      check(pointer.op == op_type_pointer && pointer.operands.size() >= 2, "has push constants that are no block");
      const uint64_t size = bytes(pointer.operands[1], 0);
      check(size <= kernel_.push_size, "reads ", size, " bytes of push constants, and the program gives ",
            kernel_.push_size);
      return;
    }
    default:
      check(false, "has a variable of storage class ", variable.storage, ", which Lapilli's kernels do not use");
    }
  }

  Kernel& kernel_;
  std::vector<uint32_t> words_;
  uint32_t bound_ = 0;
  uint32_t steps_ = 0;
  uint32_t entry_ = 0;
  uint32_t local_entry_ = 0;
  bool local_is_id_ = false;
  std::array<uint32_t, 3> local_{};
  std::unordered_map<uint32_t, Type> types_;
  std::unordered_map<uint32_t, uint32_t> constants_;
  std::unordered_map<uint32_t, Decorations> decorations_;
  std::vector<Variable> variables_;
};

} // namespace

void verify_spirv(Kernel& kernel) { Walk(kernel).run(); }

} // namespace lapilli
