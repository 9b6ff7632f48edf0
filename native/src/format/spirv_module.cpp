#include "format/spirv_module.h"

#include "base/error.h"

#include <algorithm>

namespace lapilli::spirv {

namespace {

constexpr uint32_t spirv_magic = 0x07230203;
constexpr size_t most_words = size_t{1} << 20;
constexpr uint32_t deepest_type = 32;
constexpr uint64_t most_bytes = uint64_t{1} << 40; // where sums and products stop

enum Decoration : uint32_t {
  decoration_block = 2,
  decoration_buffer_block = 3,
  decoration_array_stride = 6,
  decoration_built_in = 11,
  decoration_binding = 33,
  decoration_set = 34,
  decoration_offset = 35,
};
// RelaxedPrecision, Restrict, Aliased, Volatile, Coherent, NonWritable, NonReadable, FPRoundingMode, NoContraction: what they
// say is no danger. FPRoundingMode has one operand.
constexpr uint32_t harmless_decorations[] = {0, 19, 20, 21, 23, 24, 25, 39, 42};

// Capabilities that a kernel may have. Others give it pointers, or see memory that robust buffer access does not guard, or are
// not asked of a device (see requirements.cpp).
constexpr uint32_t known_capabilities[] = {
    1,  // Shader
    9,  // Float16
    10, // Float64
    11, // Int64
    22, // Int16
    39, // Int8
    46, // SampledBuffer
    61, // GroupNonUniform and its operations
    62,   63,   64,   65, 66, 68,
    4433, // StorageBuffer16BitAccess
    4434, // UniformAndStorageBuffer16BitAccess
    4448, // StorageBuffer8BitAccess
    4449, // UniformAndStorageBuffer8BitAccess
    5116, // BFloat16TypeKHR
    5118, // BFloat16CooperativeMatrixKHR
    5345, // VulkanMemoryModel
    5346, // VulkanMemoryModelDeviceScope
    6016, // DotProductInputAll, its kinds and DotProduct
    6017, 6018, 6019,
    6022, // CooperativeMatrixKHR
};

// The order of a module's parts.
uint32_t part_of(uint32_t op) {
  switch (op) {
  case op_capability:
    return 0;
  case op_extension:
    return 1;
  case op_import:
    return 2;
  case op_memory_model:
    return 3;
  case op_entry_point:
    return 4;
  case op_execution_mode:
    return 5;
  case 5:
  case 6:
    return 6; // names
  case op_decorate:
  case op_member_decorate:
    return 7;
  default:
    return op == 1 || (op >= op_type_void && op <= op_constant_null) || op == op_variable || op == op_type_matrix_khr
               ? 8
               : 9;
  }
}

bool is_terminator(uint32_t op) {
  return op == op_branch || op == op_branch_conditional || op == op_switch || op == op_return ||
         op == op_return_value || op == op_unreachable;
}

} // namespace

void Module::refuse(const std::string& why) const {
  invalid_file("The program is damaged, or not from Lapilli's compiler: the SPIR-V code of kernel \"", kernel.name,
               "\" ", why, ".");
}

Module::Module(const Kernel& given) : kernel(given), words(given.code) {
  header();
  types.emplace_back();
  size_t at = 5;
  uint32_t part = 0, memory_models = 0;
  while (at < words.size()) {
    const uint32_t length = words[at] >> 16, op = words[at] & 0xffff;
    check(length > 0 && length <= words.size() - at, "has an instruction of ", length, " words at word ", at);
    const Form* form = find_form(op);
    check(form != nullptr, "has instruction ", op, ", which Lapilli's kernels do not use");
    if (open_ == nullptr) {
      check(part_of(op) >= part, "has instruction ", op, " where it may not be");
      part = part_of(op);
    }
    memory_models += op == op_memory_model;
    instructions.push_back({op, static_cast<uint32_t>(at + 1), length - 1, form});
    instruction(instructions.back());
    at += length;
  }
  check(open_ == nullptr, "has a function that does not end");
  check(memory_models == 1, "has ", memory_models, " memory models");
  check(!entry_name.empty(), "has no entry point");
}

void Module::header() {
  check(words.size() >= 5, "has ", words.size() * 4, " bytes");
  check(words.size() <= most_words, "has ", words.size() * 4, " bytes; at most ", most_words * 4, " are possible");
  check(words[0] == spirv_magic, "does not begin with SPIR-V's magic number");
  check(words[1] >= 0x00010000 && words[1] <= 0x00010600 && (words[1] & 0xff) == 0, "has unknown version ", words[1]);
  check(words[3] > 0 && words[3] <= words.size() * 4 + 1024 && words[4] == 0, "has bound ", words[3]);
  ids.resize(words[3]);
  type_index.resize(words[3]);
}

uint32_t Module::id(uint32_t value) const {
  check(value > 0 && value < ids.size(), "names id ", value, " beyond its bound ", ids.size());
  return value;
}

uint32_t Module::expect(uint32_t value, Role role, const char* what) const {
  const Role found = ids[id(value)].role;
  check(found == role || (role == Role::value && found == Role::constant), "names id ", value, " as ", what,
        ", which it is not");
  return value;
}

size_t Module::text(const Instruction& i, size_t at) const {
  for (size_t n = at; n < i.count; ++n)
    for (uint32_t shift = 0; shift < 32; shift += 8)
      if ((words[i.at + n] >> shift & 0xff) == 0)
        return n + 1 - at;
  refuse("has a text that does not end");
}

std::optional<uint64_t> Module::number(uint32_t value) const {
  const Instruction& found = instructions[ids[value].instruction];
  if (ids[value].role != Role::constant || found.op != op_constant || type_of(value).op != op_type_int)
    return std::nullopt;
  const uint64_t low = words[found.at + 2];
  return found.count > 3 ? low | uint64_t{words[found.at + 3]} << 32 : low;
}

void Module::instruction(const Instruction& i) {
  if (open_ != nullptr && i.op != op_parameter && i.op != op_function_end && i.op != op_label)
    check(in_block_, "has instruction ", i.op, " outside of a block");
  use(i);
  if (i.op == op_function || i.op == op_parameter || i.op == op_function_end || i.op == op_label)
    function(i);
  else
    check(open_ != nullptr || part_of(i.op) < 9, "has instruction ", i.op, " outside of a function");
  define(i);
  if (i.op <= op_capability)
    declare(i);
  if (i.op == op_decorate || i.op == op_member_decorate)
    decorate(i);
  if (is_terminator(i.op))
    in_block_ = false;
}

// Every operand is there and is what its letter says.
void Module::use(const Instruction& i) {
  const std::span<const uint32_t> given = operands(i);
  size_t at = 0;
  bool optional = false;
  const auto one = [&](char kind) {
    if (optional && at == given.size())
      return;
    check(at < given.size(), "has instruction ", i.op, " with ", given.size(), " operands");
    const uint32_t value = given[at];
    switch (kind) {
    case 'T':
    case 't':
      expect(value, Role::type, "a type");
      break;
    case 'v':
      expect(value, Role::value, "a value");
      break;
    case 'c':
      check(ids[expect(value, Role::value, "a constant")].role == Role::constant, "names id ", value,
            " as a constant, which it is not");
      break;
    case 'R':
      check(ids[id(value)].role == Role::none, "defines id ", value, " twice");
      break;
    case 'i':
    case 'l':
    case 'f':
      id(value);
      break;
    default: // a number
      break;
    }
    ++at;
  };
  for (const char* kind = i.form->operands; *kind != '\0'; ++kind) {
    switch (*kind) {
    case '?':
      optional = true;
      continue;
    case 's':
      at += text(i, at);
      break;
    case 'U':
    case 'V':
    case 'C':
    case 'I':
    case 'N': {
      const char single = *kind == 'U' ? 't' : *kind == 'V' ? 'v' : *kind == 'C' ? 'c' : *kind == 'I' ? 'i' : 'n';
      while (at < given.size())
        one(single);
      break;
    }
    case 'P':
    case 'W':
      check((given.size() - at) % 2 == 0, "has instruction ", i.op, " with ", given.size(), " operands");
      while (at < given.size()) {
        if (*kind == 'P')
          id(given[at]);
        id(given[at + 1]);
        at += 2;
      }
      break;
    case 'x':
      if (at < given.size()) {
        const uint32_t mask = given[at++];
        check(mask < 64, "has unknown memory operands ", mask);
        optional = false;
        if ((mask & 2) != 0)
          one('n');
        if ((mask & 8) != 0)
          one('c');
        if ((mask & 16) != 0)
          one('c');
      }
      break;
    default:
      one(*kind);
    }
  }
  check(at == given.size(), "has instruction ", i.op, " with ", given.size(), " operands");
}

void Module::define(const Instruction& i) {
  const std::string_view kinds = i.form->operands;
  const size_t place = kinds.starts_with("TR") ? 1 : 0;
  if (!kinds.starts_with("TR") && !kinds.starts_with('R'))
    return;
  const uint32_t result = words[i.at + place];
  Id& defined = ids[result];
  defined.instruction = static_cast<uint32_t>(instructions.size() - 1);
  defined.type = place == 1 ? words[i.at] : 0;
  if (open_ != nullptr && !open_->blocks.empty())
    defined.block = static_cast<uint32_t>(open_->blocks.size() - 1);
  if (place == 1) {
    const uint32_t kind = type(defined.type).op;
    check(kind != op_type_function && (kind != op_type_void || i.op == op_call || i.op == op_function),
          "has a value of type ", defined.type, ", which has no values");
    defined.role = i.op == op_function                       ? Role::function
                   : open_ == nullptr && i.op != op_variable ? Role::constant
                                                             : Role::value;
    if (i.op == op_variable && open_ == nullptr)
      variables.push_back(defined.instruction);
    return;
  }
  defined.role = i.op == op_label ? Role::label : i.op == op_import ? Role::import : Role::type;
  if (defined.role == Role::type)
    define_type(i, result);
}

void Module::define_type(const Instruction& i, uint32_t result) {
  const std::span<const uint32_t> given = operands(i).subspan(1);
  Type made{};
  made.op = i.op;
  uint32_t depth = 0;
  const auto part = [&](uint32_t member) -> const Type& {
    const Type& found = type(member);
    // Elements of matrices are taken out and put together by twos, as words.
    check(!found.is_bfloat || i.op == op_type_matrix_khr || i.op == op_type_vector || i.op == op_type_function ||
              (i.op == op_type_pointer && given[0] == storage_function),
          "has bfloat16 in memory");
    depth = std::max(depth, found.depth + 1);
    check(depth < deepest_type, "has types that are nested too deeply");
    return found;
  };
  const auto data = [&](uint32_t member) -> const Type& {
    const Type& found = part(member);
    check(found.op != op_type_void && found.op != op_type_function && found.op != op_type_pointer &&
              found.op != op_type_image,
          "has a type made of type ", member, ", of which it cannot be made");
    return found;
  };
  switch (i.op) {
  case op_type_bool:
    made.bytes = 4;
    break;
  case op_type_int:
  case op_type_float:
    made.width = given[0];
    check(made.width == 32 || made.width == 64 || made.width == 16 || (made.width == 8 && i.op == op_type_int),
          "has numbers of ", made.width, " bits");
    check(i.op == op_type_float || given[1] < 2, "has an integer type that is neither signed nor unsigned");
    made.is_bfloat = i.op == op_type_float && given.size() > 1;
    check(!made.is_bfloat || (made.width == 16 && given[1] == 0 && given.size() == 2),
          "has floats of an unknown encoding");
    made.is_signed = i.op == op_type_int && given[1] == 1;
    made.bytes = made.width / 8;
    break;
  case op_type_vector: {
    const Type& element = data(given[0]);
    check(element.op >= op_type_bool && element.op <= op_type_float && given[1] >= 2 && given[1] <= 4,
          "has a vector of ", given[1], " components of type ", given[0]);
    made.element = given[0];
    made.count = given[1];
    made.is_bfloat = element.is_bfloat;
    made.bytes = element.bytes * made.count;
    break;
  }
  case op_type_image: {
    const Type& element = part(given[0]);
    // Only what a uniform texel buffer is: Dim Buffer, no depth, not arrayed, one sample, sampled.
    const bool integers = element.op == op_type_int && !element.is_signed;
    check((element.op == op_type_float || integers) && element.width == 32 && given[1] == 5 && given[2] != 1 &&
              given[3] == 0 && given[4] == 0 && given[5] == 1,
          "has an image that is no uniform texel buffer");
    made.element = given[0];
    break;
  }
  case op_type_array: {
    const Type& element = data(given[0]);
    const auto length = number(given[1]);
    check(length && *length > 0 && *length <= UINT32_MAX && element.op != op_type_runtime_array,
          "has an array whose length is no constant above 0, or whose elements have no size");
    made.element = given[0];
    made.count = *length;
    made.bytes = element.bytes > most_bytes / made.count ? most_bytes : element.bytes * made.count;
    break;
  }
  case op_type_runtime_array:
    check(data(given[0]).op != op_type_runtime_array, "has an array of arrays without a size");
    made.element = given[0];
    break;
  case op_type_struct:
    made.members.assign(given.begin(), given.end());
    for (size_t m = 0; m < given.size(); ++m) {
      const Type& member = data(given[m]);
      check(member.op != op_type_runtime_array || m + 1 == given.size(),
            "has an array without a size that is not the last member");
      made.bytes = std::min(most_bytes, made.bytes + member.bytes);
    }
    break;
  case op_type_pointer:
    made.storage = given[0];
    check(part(given[1]).op != op_type_pointer && part(given[1]).op != op_type_void &&
              part(given[1]).op != op_type_function,
          "has a pointer to what nothing can point to");
    made.element = given[1];
    made.bytes = 8;
    break;
  case op_type_function:
    part(given[0]);
    made.element = given[0];
    made.members.assign(given.begin() + 1, given.end());
    for (const uint32_t parameter : made.members)
      check(part(parameter).op != op_type_void && part(parameter).op != op_type_function,
            "has a parameter without a value");
    break;
  case op_type_matrix_khr: {
    const Type& element = data(given[0]);
    check(element.op == op_type_float || element.op == op_type_int, "has a matrix of what is no number");
    made.element = given[0];
    uint64_t size = element.bytes;
    for (const uint32_t operand : given.subspan(1)) {
      const auto value = number(operand);
      check(value && *value <= 1024, "has a matrix whose sizes are no constants, or above 1024");
      made.members.push_back(static_cast<uint32_t>(*value));
    }
    check(made.members[0] == 3 && made.members[3] < 3, "has a matrix of unknown scope or use");
    size *= uint64_t{made.members[1]} * made.members[2];
    made.bytes = size / 4; // of one invocation, in a subgroup of 4 or more
    break;
  }
  default:
    break;
  }
  made.depth = depth;
  type_index[result] = static_cast<uint32_t>(types.size());
  types.push_back(std::move(made));
}

void Module::declare(const Instruction& i) {
  const std::span<const uint32_t> given = operands(i);
  const auto characters = [&](size_t at, size_t count) {
    std::string result;
    for (const uint32_t word : given.subspan(at, count))
      for (uint32_t shift = 0; shift < 32; shift += 8)
        if (const char c = static_cast<char>(word >> shift & 0xff); c != '\0')
          result += c;
        else
          return result;
    return result;
  };
  switch (i.op) {
  case op_capability:
    check(std::ranges::find(known_capabilities, given[0]) != std::end(known_capabilities), "wants capability ",
          given[0], ", which Lapilli's kernels do not use");
    capabilities.push_back(given[0]);
    break;
  case op_import:
    check(characters(1, given.size() - 1) == "GLSL.std.450", "imports instructions that Lapilli's kernels do not use");
    break;
  case op_memory_model:
    check(given[0] == 0, "has pointers (addressing model ", given[0], ")");
    check(given[1] == 1 || given[1] == 3, "has memory model ", given[1]);
    break;
  case op_entry_point: {
    check(given[0] == 5, "has an entry point that is not a compute shader");
    check(entry_name.empty(), "has more than one entry point");
    entry = given[1];
    entry_name = characters(2, text(i, 2));
    check(!entry_name.empty() && entry_name.size() <= 256, "has an entry point without a name");
    break;
  }
  case op_execution_mode:
    check(given[0] == entry && given[1] == 17 && given.size() == 5 && !local, "has execution mode ", given[1],
          ", which Lapilli's kernels do not use, or two work-group sizes");
    local = {given[2], given[3], given[4]};
    break;
  default:
    break;
  }
}

// What counts once may be there once: drivers differ in which of two they take.
void Module::decorate(const Instruction& i) {
  const std::span<const uint32_t> given = operands(i);
  const bool member = i.op == op_member_decorate;
  const size_t extra = given.size() - (member ? 3 : 2);
  const uint32_t what = given[member ? 2 : 1];
  const auto once = [&](std::optional<uint32_t>& value) {
    check(extra == 1 && !value, "decorates id ", given[0], " twice with ", what);
    value = given[2];
  };
  Decorations& found = decorations[given[0]];
  if (member && what == decoration_offset) {
    check(extra == 1, "has an offset without a number");
    found.offsets.emplace_back(given[1], given[3]);
  } else if (!member && what == decoration_block && extra == 0) {
    found.block = true;
  } else if (!member && what == decoration_buffer_block && extra == 0) {
    found.buffer_block = true;
  } else if (!member && what == decoration_array_stride) {
    once(found.array_stride);
  } else if (!member && what == decoration_built_in) {
    once(found.built_in);
  } else if (!member && what == decoration_binding) {
    once(found.binding);
  } else if (!member && what == decoration_set) {
    once(found.set);
  } else {
    check(std::ranges::find(harmless_decorations, what) != std::end(harmless_decorations) &&
              extra == (what == 39 ? 1 : 0),
          "has decoration ", what, ", which Lapilli's kernels do not use");
  }
}

void Module::function(const Instruction& i) {
  const std::span<const uint32_t> given = operands(i);
  const auto number = static_cast<uint32_t>(instructions.size() - 1);
  switch (i.op) {
  case op_function: {
    check(open_ == nullptr, "has a function in a function");
    const Type& signature = type(given[3]);
    check(signature.op == op_type_function && signature.element == given[0] && given[2] < 16,
          "has a function that is not of its type");
    function_index[given[1]] = functions.size();
    open_ = &functions.emplace_back();
    open_->id = given[1];
    open_->type = given[3];
    open_->first = number;
    break;
  }
  case op_parameter: {
    check(open_ != nullptr && open_->blocks.empty(), "has a parameter outside of a function");
    const std::vector<uint32_t>& wanted = type(open_->type).members;
    check(open_->parameters.size() < wanted.size() && wanted[open_->parameters.size()] == given[0],
          "has a function whose parameters are not those of its type");
    open_->parameters.push_back(given[1]);
    break;
  }
  case op_label:
    check(open_ != nullptr && !in_block_, "has a block in a block");
    open_->blocks.push_back(number);
    in_block_ = true;
    break;
  default:
    check(open_ != nullptr && !in_block_ && !open_->blocks.empty() &&
              open_->parameters.size() == type(open_->type).members.size(),
          "has a function without blocks, or without some of its parameters");
    open_->last = number;
    open_ = nullptr;
  }
}

} // namespace lapilli::spirv
