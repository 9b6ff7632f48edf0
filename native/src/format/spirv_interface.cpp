// What a kernel sees and takes: its buffers, its parameters, work-group and private memory, and how long it is once drivers have
// put functions in the place of their calls.

#include "base/error.h"
#include "format/spirv_module.h"

#include <algorithm>
#include <map>

namespace lapilli::spirv {

namespace {

constexpr uint64_t most_private = uint64_t{128} << 10; // bytes of an invocation's variables
constexpr uint64_t most_inlined = uint64_t{1} << 19;   // instructions
constexpr uint32_t deepest_call = 64;
// PackHalf2x16 and UnpackHalf2x16 of the extended instructions (GLSL.std.450).
constexpr uint32_t pack_half = 58, unpack_half = 62;

class Interface {
public:
  Interface(const Module& module, Kernel& kernel) : m_(module), kernel_(kernel) {}

  void run() {
    work_group();
    uint64_t shared = 0, own = 0;
    for (const uint32_t n : m_.variables) {
      const std::span<const uint32_t> given = m_.operands(m_.instructions[n]);
      const Type& pointer = m_.type(given[0]);
      const uint64_t bytes = m_.type(pointer.element).bytes;
      switch (given[2]) {
      case storage_input:
        built_in(given[1], pointer);
        break;
      case storage_workgroup:
        need_size(pointer);
        shared = std::min(limit, shared + (bytes + 15) / 16 * 16);
        break;
      case storage_private:
        need_size(pointer);
        own = std::min(limit, own + bytes);
        break;
      case storage_uniform_constant:
      case storage_uniform:
      case storage_buffer:
        buffer(given[1], given[2], pointer);
        break;
      case storage_push_constant:
        m_.check(!std::exchange(pushes_, true), "has two blocks of push constants");
        push_constants(pointer);
        break;
      default:
        m_.check(false, "has a variable of storage class ", given[2], ", which Lapilli's kernels do not use");
      }
    }
    for (const auto& [id, decorations] : m_.decorations)
      m_.check(!decorations.built_in || is_input(id), "has a built-in value that is no input");
    m_.check(shared <= (uint64_t{kernel_.shared_size} + 15) / 16 * 16, "has ", shared,
             " bytes of work-group memory, and the program says ", kernel_.shared_size);
    const auto entry = m_.function_index.find(m_.entry);
    m_.check(entry != m_.function_index.end(), "has an entry point that is no function");
    const Type& signature = m_.type(m_.functions[entry->second].type);
    m_.check(signature.members.empty() && m_.type(signature.element).op == op_type_void,
             "has an entry point with parameters or a result");
    for (size_t f = 0; f < m_.functions.size(); ++f)
      inlined(f, 0);
    const Cost cost = costs_.at(entry->second);
    m_.check(cost.instructions <= most_inlined, "has ", most_inlined, " instructions or more when calls are inlined");
    m_.check(own + cost.variables <= most_private, "has ", own + cost.variables,
             " bytes of variables in each invocation; at most ", most_private, " are possible");
    conclude();
  }

private:
  static constexpr uint64_t limit = uint64_t{1} << 50;

  struct Cost {
    uint64_t instructions = 0, variables = 0;
  };

  void work_group() const {
    m_.check(m_.local.has_value(), "does not say its work-group size");
    const std::array<uint32_t, 3>& local = *m_.local;
    m_.check(local == kernel_.local, "has work groups of ", local[0], "x", local[1], "x", local[2],
             ", and the program says ", kernel_.local[0], "x", kernel_.local[1], "x", kernel_.local[2]);
    m_.check(local[0] > 0 && local[1] > 0 && local[2] > 0, "has an empty work group");
  }

  void need_size(const Type& pointer) const {
    m_.check(m_.type(pointer.element).bytes > 0, "has a variable without a size");
  }

  bool is_input(uint32_t id) const {
    return id < m_.ids.size() && m_.ids[id].role == Role::value &&
           m_.instructions[m_.ids[id].instruction].op == op_variable && m_.type_of(id).storage == storage_input;
  }

  void built_in(uint32_t id, const Type& pointer) const {
    const auto found = m_.decorations.find(id);
    m_.check(found != m_.decorations.end() && found->second.built_in, "has an input that is no built-in value");
    const uint32_t number = *found->second.built_in;
    // NumWorkgroups, WorkgroupId, LocalInvocationId, GlobalInvocationId; the rest are one number
    const bool vector = number == 24 || number == 26 || number == 27 || number == 28;
    const bool known = vector || number == 29 || number == 36 || number == 38 || number == 40 || number == 41;
    const Type& of = m_.type(pointer.element);
    const Type& scalar = vector && of.op == op_type_vector && of.count == 3 ? m_.type(of.element) : of;
    m_.check(known && scalar.op == op_type_int && scalar.width == 32 && (!vector || of.op == op_type_vector),
             "has built-in value ", number, ", which Lapilli's kernels do not use, or in another type");
  }

  void buffer(uint32_t id, uint32_t storage, const Type& pointer) {
    const auto found = m_.decorations.find(id);
    m_.check(found != m_.decorations.end() && found->second.binding, "has a buffer without a binding");
    const uint32_t binding = *found->second.binding, set = found->second.set.value_or(0);
    m_.check(set == 0 && binding < kernel_.bindings, "reads binding ", binding, " of set ", set,
             ", and the program gives ", kernel_.bindings, " bindings of set 0");
    const bool texel = kernel_.types[binding] != BindingType::storage;
    m_.check(texel == (storage == storage_uniform_constant), "sees binding ", binding,
             " as another type of buffer than the program says");
    const Type& of = m_.type(pointer.element);
    if (texel) {
      m_.check(of.op == op_type_image, "has binding ", binding, " that is no texel buffer");
      const bool words = m_.type(of.element).op == op_type_int;
      m_.check(words == (kernel_.types[binding] == BindingType::texel_uint8), "reads binding ", binding,
               " as numbers of another kind than its texels have");
    } else {
      m_.check(of.op == op_type_struct && is_block(pointer.element, storage == storage_uniform), "has binding ",
               binding, " that is no block");
      layout(pointer.element, 0, true);
    }
    if (m_.stored.contains(id))
      kernel_.stored |= 1u << binding;
  }

  bool is_block(uint32_t type, bool old = false) const {
    const auto found = m_.decorations.find(type);
    return found != m_.decorations.end() && (old ? found->second.buffer_block : found->second.block);
  }

  // Bytes of a type of explicit layout, all of which is there and does not overlap.
  uint64_t layout(uint32_t id, uint32_t depth, bool open) {
    m_.check(depth < 16 && ++steps_ < 65536, "has a block that is nested too deeply");
    const Type& of = m_.type(id);
    const auto found = m_.decorations.find(id);
    switch (of.op) {
    case op_type_int:
    case op_type_float:
      return of.width / 8;
    case op_type_vector:
      return layout(of.element, depth + 1, false) * of.count;
    case op_type_array:
    case op_type_runtime_array: {
      const uint64_t element = layout(of.element, depth + 1, false);
      const uint64_t stride = found != m_.decorations.end() ? found->second.array_stride.value_or(0) : 0;
      m_.check(stride >= element && (of.op == op_type_array || open), "has an array without a stride in a block");
      return of.op == op_type_array ? std::min(limit, of.count * stride) : 0;
    }
    case op_type_struct: {
      std::map<uint32_t, uint32_t> offsets;
      if (found != m_.decorations.end())
        for (const auto& [member, offset] : found->second.offsets)
          m_.check(member < of.members.size() && offsets.emplace(member, offset).second,
                   "decorates a member that does not exist, or twice");
      m_.check(offsets.size() == of.members.size(), "has a block whose members have no offsets");
      uint64_t end = 0;
      for (const auto& [member, offset] : offsets) {
        m_.check(offset >= end, "has a block whose members overlap");
        end = offset + layout(of.members[member], depth + 1, open && member + 1 == of.members.size());
      }
      return end;
    }
    default:
      m_.check(false, "has a block with a type ", of.op, ", which has no layout");
      return 0;
    }
  }

  void push_constants(const Type& pointer) {
    m_.check(m_.type(pointer.element).op == op_type_struct && is_block(pointer.element),
             "has push constants that are no block");
    const uint64_t size = layout(pointer.element, 0, false);
    m_.check(size <= kernel_.push_size, "reads ", size, " bytes of push constants, and the program gives ",
             kernel_.push_size);
  }

  // Of a function with what it calls; recursion is found by its depth.
  Cost inlined(size_t index, uint32_t depth) {
    m_.check(depth < deepest_call, "has calls that are nested too deeply, or recursive");
    if (const auto known = costs_.find(index); known != costs_.end())
      return known->second;
    const Function& function = m_.functions[index];
    Cost sum{function.last - function.first, function.variables};
    for (const uint32_t called : function.calls) {
      const Cost cost = inlined(m_.function_index.at(called), depth + 1);
      sum.instructions = std::min(limit, sum.instructions + cost.instructions);
      sum.variables = std::min(limit, sum.variables + cost.variables);
    }
    return costs_[index] = sum;
  }

  void conclude() {
    m_.check(!m_.takes_elements || (kernel_.subgroup_size > 0 && kernel_.subgroup_size <= 32),
             "takes elements of matrices, for which it must ask for subgroups of at most 32");
    kernel_.entry_point = m_.entry_name;
    kernel_.spirv_version = m_.words[1];
    kernel_.capabilities = m_.capabilities;
    std::ranges::sort(kernel_.capabilities);
    kernel_.converts_halves = std::ranges::any_of(m_.instructions, [&](const Instruction& i) {
      return i.op == op_ext_inst && (m_.operands(i)[3] == pack_half || m_.operands(i)[3] == unpack_half);
    });
    kernel_.multiplies_bytes = std::ranges::any_of(m_.types, [&](const Type& type) {
      return type.op == op_type_matrix_khr && m_.type(type.element).op == op_type_int &&
             m_.type(type.element).width == 8;
    });
  }

  const Module& m_;
  Kernel& kernel_;
  bool pushes_ = false;
  uint32_t steps_ = 0;
  std::unordered_map<size_t, Cost> costs_;
};

} // namespace

void check_interface(const Module& module, Kernel& kernel) { Interface(module, kernel).run(); }

} // namespace lapilli::spirv
