// A program in memory, after it was verified: every index below is in range, every list has the length it must have.
// Nothing here refers to the file.
#pragma once

#include "base/platform.h"
#include "lapilli.h"
#include "program_generated.h"

#include <array>
#include <span>
#include <string>
#include <vector>

namespace lapilli {

using schema::BindingType;
using schema::BufferKind;
using schema::DeviceKind;
using schema::DType;
using schema::ExprOp;
using schema::Feature;
using schema::KernelFormat;

using ExprIndex = uint32_t; // into Method::exprs

struct Expr {
  int64_t value;
  ExprIndex a, b;
  ExprOp op;
};

struct Symbol {
  std::string name;
  int64_t min;
  int64_t max; // -1: no bound
  uint32_t input;
  uint32_t axis; // its size is factor * symbol + offset
  int64_t factor = 1;
  int64_t offset = 0;
  bool given = false; // by the caller of every run: no input shows it
};

struct TensorSpec {
  std::string name;
  DType dtype;
  std::vector<ExprIndex> shape;
};

struct Constant {
  std::string name;
  DType dtype;
  std::vector<uint32_t> shape;
  uint64_t offset; // in the data section
  uint64_t bytes;
};

struct State {
  std::string name;
  DType dtype;
  std::vector<uint32_t> shape;
  int32_t constant; // the initial value; -1: zeros
  uint64_t bytes;
};

struct Kernel {
  std::string name;
  KernelFormat format;
  uint64_t code_offset;       // in the data section
  uint64_t code_size;         // in bytes
  std::vector<uint32_t> code; // until the pipelines are there
  uint32_t bindings;
  uint32_t push_size;
  std::array<uint32_t, 3> local;
  uint32_t subgroup_size;
  uint32_t shared_size;
  std::vector<BindingType> types; // one per binding
  std::string entry_point;
  uint32_t spirv_version;             // 0x00010300: 1.3
  std::vector<uint32_t> capabilities; // SPIR-V numbers, sorted
  bool converts_halves = false;       // it packs or unpacks 16-bit floats
  bool multiplies_bytes = false;      // it has matrices of integers of 8 bits
  uint32_t stored = 0;                // bit i: its code may store through binding i
};

struct Buffer {
  std::string name;
  BufferKind kind;
  uint32_t index; // of a constant, input, output or state
  ExprIndex size;
  uint32_t first, last; // run commands, for arena buffers
};

struct Binding {
  uint32_t buffer;
  ExprIndex offset;
  ExprIndex size;
};

struct Dispatch {
  std::string label;
  uint32_t kernel;
  uint32_t written; // bit i: binding i
  bool barrier;
  std::vector<Binding> bindings;
  std::vector<ExprIndex> params;
  std::array<ExprIndex, 3> groups;
  ExprIndex flops;
  ExprIndex bytes;
  bool rounds_input = false;
};

struct Requirements {
  DeviceKind device = DeviceKind::any;
  uint64_t features = 0; // Feature bits
  uint32_t max_workgroup_invocations = 0;
  std::array<uint32_t, 3> max_workgroup_size{};
  uint32_t shared_memory = 0;
  uint32_t subgroup_size = 0;
  uint32_t subgroup_operations = 0; // SubgroupOperation bits
  uint32_t max_bindings = 0;
  uint32_t max_texel_elements = 0;
  uint64_t storage_range = 0; // bytes of a storage buffer at once, where the next plan binds less
};

// What a command that rounds an input binds (see `rounds_input` in program.fbs).
struct Rounded {
  uint32_t from, to; // buffers: of kind input, of kind arena
};
Rounded rounded_by(const Dispatch& dispatch);

struct Plan {
  std::string name;
  Requirements requirements;
  std::vector<Buffer> buffers;
  std::vector<Dispatch> load;
  std::vector<Dispatch> run;
};

struct Method {
  std::string name;
  std::vector<Symbol> symbols;
  std::vector<Expr> exprs;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs; // with checks, their result comes last
  std::vector<Plan> plans;
  std::vector<std::string> checks;
  int64_t integer_limit = 0;

  std::span<const TensorSpec> given_outputs() const { // those that the caller gets
    return std::span(outputs).first(outputs.size() - (checks.empty() ? 0 : 1));
  }
};

struct Model {
  uint64_t file_size, structure_size, data_size; // in bytes
  uint64_t checksum = 0;                         // as the header has it
  std::string producer;
  std::vector<Method> methods;
  std::vector<Constant> constants;
  std::vector<State> states;
  std::vector<Kernel> kernels;
  std::vector<std::string> host_operators;
  std::vector<std::pair<std::string, std::string>> metadata;
};

inline constexpr uint32_t max_rank = LAPILLI_MAX_RANK;
inline constexpr uint32_t max_bindings = 32; // bits of Dispatch::written
inline constexpr uint32_t max_push_size = 128;

uint32_t size_of(DType dtype);
uint32_t texel_size(BindingType type); // bytes of an element of a texel buffer; 0 for a storage buffer
const char* name_of(DType dtype);
const char* name_of(BufferKind kind);

} // namespace lapilli
