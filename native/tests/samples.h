// Small programs for tests, built without the compiler.
#pragma once

#include "program_generated.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace schema = lapilli::schema;

using FileBytes = std::vector<std::byte>;

// Puts the parts of a program together, and the file around them.
class ProgramBuilder {
public:
  uint32_t kernel(const std::string& name, std::span<const uint32_t> code, uint32_t bindings, uint32_t local_x = 64,
                  std::vector<schema::BindingType> types = {});
  uint32_t constant(const std::string& name, std::span<const float> values);
  void state(const std::string& name, uint32_t size, int32_t constant);
  FileBytes finish();

  schema::ProgramT program;

private:
  uint64_t section(const void* data, size_t size);
  FileBytes data_;
};

class MethodBuilder {
public:
  MethodBuilder() { number(0); } // expression 0: a cost that is not counted
  uint32_t number(int64_t value) { return add(schema::ExprOp::constant, value, 0, 0); }
  uint32_t symbol(const std::string& name, int64_t min, int64_t max, uint32_t input, uint32_t axis);
  uint32_t given(const std::string& name, int64_t min, int64_t max);
  uint32_t op(schema::ExprOp op, uint32_t a, uint32_t b) { return add(op, 0, a, b); }
  uint32_t times(uint32_t a, int64_t b) { return op(schema::ExprOp::mul, a, number(b)); }
  uint32_t groups(uint32_t items, int64_t size) { // ceil(items / size)
    return op(schema::ExprOp::floordiv, op(schema::ExprOp::add, items, number(size - 1)), number(size));
  }
  void input(const std::string& name, std::vector<uint32_t> shape, schema::DType dtype = schema::DType::float32);
  void output(const std::string& name, std::vector<uint32_t> shape, schema::DType dtype = schema::DType::float32);

  schema::MethodT method;

private:
  uint32_t add(schema::ExprOp op, int64_t value, uint32_t a, uint32_t b);
};

class PlanBuilder {
public:
  explicit PlanBuilder(const std::string& name) { plan.name = name; }
  uint32_t buffer(schema::BufferKind kind, uint32_t size, uint32_t index = 0, uint32_t first = 0, uint32_t last = 0);
  struct Bound {
    uint32_t buffer;
    uint32_t size;
    bool written = false;
  };
  schema::DispatchT& dispatch(bool load, uint32_t kernel, std::vector<Bound> bindings, std::vector<uint32_t> params,
                              uint32_t groups_x, uint32_t one, bool barrier, const std::string& label);

  schema::PlanT plan;
};

struct SampleOptions {
  uint32_t width = 7;
  int64_t max_batch = 16;
  bool texel = false;            // the second kernel reads through a texel buffer
  int64_t scratch = 0;           // bytes of one more arena buffer
  bool impossible_first = false; // a better plan that no device satisfies
  bool impossible_only = false;
  bool fast_first = false; // a better plan, "fast", that ends with a kernel of its own
  uint64_t fast_range = 0; // bytes that it binds at once, and the other plan in parts
  int64_t factor = 1;
  int64_t offset = 0;
  uint8_t format = 0;               // of the last kernel
  uint32_t subgroup_operations = 0; // that the plan asks for
};

// y = 2 (x + 3 w) + c, for x of shape (factor * N + offset, width), N in 0..max_batch, w[i] = i, c[i] = 5 + i / 8. 3 w is computed
// at load.
FileBytes sample_program(const SampleOptions& options = {});
float sample_result(float x, uint32_t column);

struct StateOptions {
  int32_t constant = 0;        // initial value of the first state: 1, 2, 3, 4
  uint32_t size = 4;           // of the states
  uint32_t buffer_bytes = 16;  // of the first state's buffer
  std::string second = "rest"; // name of the second state, which begins as zeros
  bool load = false;           // a load command that reads a state
  std::vector<std::string> host_operators{};
};

// Methods: 0, "add": x of shape (4,) is added to the state "total", and the sum returned; 1, "total": returns it;
// 2, "size": the first N of 1, 2, 3, 4 for an input of shape (N, 0); 3, "nothing": takes the same, has no commands and
// no outputs.
FileBytes state_program(const StateOptions& options = {});

struct CheckOptions {
  bool result = true; // the output for the result of the checks
  int64_t limit = 0;
};

// y = x, both of shape (4,), with one check, "sum", which fails where x[0] is not 0.
FileBytes checked_program(const CheckOptions& options = {});

// y = a + b, all of shape (N,), N from 1.
FileBytes sum_program();

// y = 2 x, both of shape (count,); x is read through a texel buffer.
FileBytes texel_program(uint32_t count);

// y[i] = x[0] for i < count; each takes a fraction of a millisecond on one core.
FileBytes slow_program(uint32_t count);

// A zip archive of stored entries as PyTorch writes them, with the wide fields of zip64 or without; data begins at multiples of 64.
struct ZipEntry {
  std::string name;
  FileBytes data;
  uint16_t method = 0; // 0: stored
};
FileBytes zip_archive(const std::vector<ZipEntry>& entries, bool wide);

// Makes the checksum fit the bytes. False when they are too few for a header.
bool repair_checksum(FileBytes& file);

void write_file(const std::string& path, std::span<const std::byte> bytes);
FileBytes read_file(const std::string& path);
