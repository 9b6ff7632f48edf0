// A SPIR-V module as it is read: every instruction is one of those that Lapilli's compiler emits or that are near to them, has
// the operands that it must have, and every id is defined once and is what its user takes it for.
#pragma once

#include "base/text.h"
#include "format/model.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace lapilli::spirv {

enum Op : uint32_t {
  op_extension = 10,
  op_import = 11,
  op_extended = 12,
  op_ext_inst = 12,
  op_memory_model = 14,
  op_entry_point = 15,
  op_execution_mode = 16,
  op_capability = 17,
  op_type_void = 19,
  op_type_bool = 20,
  op_type_int = 21,
  op_type_float = 22,
  op_type_vector = 23,
  op_type_image = 25,
  op_type_array = 28,
  op_type_runtime_array = 29,
  op_type_struct = 30,
  op_type_pointer = 32,
  op_type_function = 33,
  op_constant_true = 41,
  op_constant = 43,
  op_constant_composite = 44,
  op_constant_null = 46,
  op_function = 54,
  op_parameter = 55,
  op_function_end = 56,
  op_call = 57,
  op_variable = 59,
  op_load = 61,
  op_store = 62,
  op_access_chain = 65,
  op_array_length = 68,
  op_decorate = 71,
  op_member_decorate = 72,
  op_phi = 245,
  op_loop_merge = 246,
  op_selection_merge = 247,
  op_label = 248,
  op_branch = 249,
  op_branch_conditional = 250,
  op_switch = 251,
  op_return = 253,
  op_return_value = 254,
  op_unreachable = 255,
  op_type_matrix_khr = 4456,
  op_matrix_load = 4457,
  op_matrix_store = 4458,
};

enum Storage : uint32_t {
  storage_uniform_constant = 0,
  storage_input = 1,
  storage_uniform = 2, // with BufferBlock: how SPIR-V before 1.3 wrote storage buffers
  storage_workgroup = 4,
  storage_private = 6,
  storage_function = 7,
  storage_push_constant = 9,
  storage_buffer = 12,
};

constexpr bool is_buffer(uint32_t storage) { return storage == storage_buffer || storage == storage_uniform; }

// What the operands of an instruction must be beyond what their kinds say: see spirv_types.cpp.
enum class Rule : uint8_t {
  none,
  same,          // operands and result are of one type, of floats
  integers,      // of integers of one width, whatever their sign
  shift,         // the first as the result, the second of as many integers of any width
  logical,       // booleans
  compare_float, // operands of one type of floats, as many booleans
  compare_int,   // of integers of one width
  test_float,    // one operand
  convert,       // scalars or vectors of as many components; see `conversion`
  bitcast,       // as many bits
  select,
  scale, // vector and scalar
  dot,
  integer_dot,
  extended_pair, // a struct of two integers
  any_all,
  shuffle,
  extract_dynamic,
  insert_dynamic,
  construct,
  extract,
  insert,
  copy,
  undefined,
  constant,
  composite,
  variable,
  load,
  store,
  access,
  length,
  fetch,
  atomic_load,
  atomic_store,
  atomic,
  atomic_compare,
  barrier,
  vote,        // subgroup operations: bool -> bool
  group_value, // value, and perhaps an index
  group_reduce,
  ballot,
  elect,
  call,
  extended,
  matrix_load,
  matrix_store,
  matrix_multiply,
  matrix_length,
};

// The operands of an instruction, one letter each: T result type, R result, v value, V values, t type, U types, c constant,
// C constants, n number, N numbers, s text, l label, i any id (which may follow), I any ids, f function, x memory operands,
// P pairs of value and label, W pairs of number and label, ? the next is optional.
struct Form {
  uint32_t op;
  const char* operands;
  Rule rule = Rule::none;
};
const Form* find_form(uint32_t op);

struct Type {
  uint32_t op = 0;
  uint32_t width = 0; // bits of a number
  bool is_signed = false;
  bool is_bfloat = false;        // bfloat16, the element of matrices, or a vector of them
  uint32_t element = 0;          // of vectors, arrays, pointers, matrices; result of functions
  uint64_t count = 0;            // of vectors and arrays
  uint32_t storage = 0;          // of pointers
  std::vector<uint32_t> members; // of structs; parameters of functions; scope, rows, columns and use of matrices
  uint64_t bytes = 0;            // about, without explicit layout; 0: not known
  uint32_t depth = 0;
};

enum class Role : uint8_t { none, import, type, constant, value, label, function };

struct Id {
  Role role = Role::none;
  uint32_t type = 0;
  uint32_t instruction = 0;    // where it is defined
  uint32_t block = UINT32_MAX; // in which block of its function; UINT32_MAX: outside or a parameter
  uint32_t root = 0;           // of pointers: the variable into which they point
};

struct Instruction {
  uint32_t op;
  uint32_t at; // of its first operand among the words
  uint32_t count;
  const Form* form;
};

struct Decorations {
  std::optional<uint32_t> set, binding, built_in, array_stride;
  bool block = false, buffer_block = false;
  std::vector<std::pair<uint32_t, uint32_t>> offsets; // member, bytes
};

struct Function {
  uint32_t id = 0, type = 0;
  uint32_t first = 0, last = 0; // instructions, from OpFunction to OpFunctionEnd
  std::vector<uint32_t> parameters;
  std::vector<uint32_t> blocks; // instructions: the labels
  std::vector<uint32_t> calls;  // ids of functions
  uint64_t variables = 0;       // bytes
};

class Module {
public:
  // Throws INVALID_FILE.
  explicit Module(const Kernel& kernel);

  template <class... Parts> void check(bool holds, const Parts&... parts) const {
    if (!holds)
      refuse(cat(parts...));
  }
  [[noreturn]] void refuse(const std::string& why) const;

  std::span<const uint32_t> operands(const Instruction& i) const { return words.subspan(i.at, i.count); }
  const Type& type(uint32_t id) const { return types[type_index[id]]; }
  const Type& type_of(uint32_t id) const { return type(ids[id].type); }
  // Of an integer constant; nothing for others.
  std::optional<uint64_t> number(uint32_t id) const;

  const Kernel& kernel;
  std::span<const uint32_t> words;
  std::vector<Instruction> instructions;
  std::vector<Id> ids;
  std::vector<Type> types;
  std::vector<uint32_t> type_index; // by id
  std::vector<Function> functions;
  std::unordered_map<uint32_t, size_t> function_index;
  std::unordered_map<uint32_t, Decorations> decorations;
  std::vector<uint32_t> capabilities;
  std::vector<uint32_t> variables;     // instructions: those outside of functions
  std::unordered_set<uint32_t> stored; // variables of buffers through which something is stored
  bool takes_elements = false;         // of matrices
  uint32_t entry = 0;
  std::string entry_name;
  std::optional<std::array<uint32_t, 3>> local;

private:
  void header();
  void instruction(const Instruction& i);
  void use(const Instruction& i);
  void define(const Instruction& i);
  void define_type(const Instruction& i, uint32_t result);
  void declare(const Instruction& i);
  void decorate(const Instruction& i);
  void function(const Instruction& i);
  uint32_t id(uint32_t value) const;
  uint32_t expect(uint32_t value, Role role, const char* what) const;
  size_t text(const Instruction& i, size_t at) const; // words of a text

  Function* open_ = nullptr;
  bool in_block_ = false;
};

// Types of operands and results, and where pointers point. Fills Id::root.
void check_types(Module& module);
// Blocks, structured control flow, and that every value is defined wherever it is used.
void check_flow(const Module& module);
// The interface of the kernel and what it takes. Fills in what `kernel` says of its code.
void check_interface(const Module& module, Kernel& kernel);

} // namespace lapilli::spirv
