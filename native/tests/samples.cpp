#include "samples.h"

#include "kernels.h"
#include "lapilli.h"

#include <cstring>
#include <fstream>

namespace {

constexpr size_t header_size = 64;

size_t aligned(size_t offset) { return (offset + 63) / 64 * 64; }

template <class T> void put(FileBytes& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

} // namespace

uint64_t ProgramBuilder::section(const void* data, size_t size) {
  const size_t offset = aligned(data_.size());
  data_.resize(offset + size);
  if (size > 0)
    std::memcpy(data_.data() + offset, data, size);
  return offset;
}

uint32_t ProgramBuilder::kernel(const std::string& name, std::span<const uint32_t> code, uint32_t bindings,
                                uint32_t local_x, std::vector<schema::BindingType> types) {
  auto kernel = std::make_unique<schema::KernelT>();
  kernel->name = name;
  kernel->code_offset = section(code.data(), code.size_bytes());
  kernel->code_size = code.size_bytes();
  kernel->bindings = bindings;
  kernel->push_size = 8;
  kernel->local_x = local_x;
  kernel->texel = std::move(types);
  program.kernels.push_back(std::move(kernel));
  return static_cast<uint32_t>(program.kernels.size() - 1);
}

uint32_t ProgramBuilder::constant(const std::string& name, std::span<const float> values) {
  auto constant = std::make_unique<schema::ConstantT>();
  constant->name = name;
  constant->dtype = schema::DType::float32;
  constant->shape = {static_cast<uint32_t>(values.size())};
  constant->offset = section(values.data(), values.size_bytes());
  constant->size = values.size_bytes();
  program.constants.push_back(std::move(constant));
  return static_cast<uint32_t>(program.constants.size() - 1);
}

void ProgramBuilder::state(const std::string& name, uint32_t size, int32_t constant) {
  auto state = std::make_unique<schema::StateT>();
  state->name = name;
  state->dtype = schema::DType::float32;
  state->shape = {size};
  state->constant = constant;
  program.states.push_back(std::move(state));
}

FileBytes ProgramBuilder::finish() {
  program.producer = "lapilli tests";
  flatbuffers::FlatBufferBuilder builder;
  builder.Finish(schema::Program::Pack(builder, &program), schema::ProgramIdentifier());
  const size_t structure = builder.GetSize();
  const size_t data_offset = aligned(header_size + structure);
  FileBytes file(data_offset + data_.size());
  std::memcpy(file.data(), "LAPILLI", 8);
  put<uint32_t>(file, 8, 2);
  put<uint32_t>(file, 12, header_size);
  put<uint64_t>(file, 16, header_size);
  put<uint64_t>(file, 24, structure);
  put<uint64_t>(file, 32, data_offset);
  put<uint64_t>(file, 40, data_.size());
  std::memcpy(file.data() + header_size, builder.GetBufferPointer(), structure);
  if (!data_.empty())
    std::memcpy(file.data() + data_offset, data_.data(), data_.size());
  repair_checksum(file);
  return file;
}

FileBytes zip_archive(const std::vector<ZipEntry>& entries, bool wide) {
  FileBytes file, directory;
  const auto put = [](FileBytes& to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i)
      to.push_back(static_cast<std::byte>(i < 8 ? value >> 8 * i : 0));
  };
  const auto text = [](FileBytes& to, const std::string& name) {
    for (const char c : name)
      to.push_back(static_cast<std::byte>(c));
  };
  for (const ZipEntry& entry : entries) {
    const uint64_t offset = file.size(), size = entry.data.size();
    const uint64_t start = (offset + 30 + entry.name.size() + 4 + 63) / 64 * 64;
    const uint64_t padding = start - offset - 30 - entry.name.size();
    put(file, 0x04034b50, 4);
    put(file, 20, 2);
    put(file, 0, 2);
    put(file, entry.method, 2);
    put(file, 0, 8); // time and checksum
    put(file, size, 4);
    put(file, size, 4);
    put(file, entry.name.size(), 2);
    put(file, padding, 2);
    text(file, entry.name);
    put(file, 0x4246, 2); // "FB", as PyTorch pads
    put(file, padding - 4, 2);
    file.resize(start);
    file.insert(file.end(), entry.data.begin(), entry.data.end());
    put(directory, 0x02014b50, 4);
    put(directory, 0, 4);
    put(directory, 0, 2);
    put(directory, entry.method, 2);
    put(directory, 0, 8);
    put(directory, wide ? UINT32_MAX : size, 4);
    put(directory, wide ? UINT32_MAX : size, 4);
    put(directory, entry.name.size(), 2);
    put(directory, wide ? 28 : 0, 2);
    put(directory, 0, 2 + 2 + 2 + 4);
    put(directory, wide ? UINT32_MAX : offset, 4);
    text(directory, entry.name);
    if (wide) {
      put(directory, 1, 2);
      put(directory, 24, 2);
      for (const uint64_t value : {size, size, offset})
        put(directory, value, 8);
    }
  }
  const uint64_t at = file.size(), end = at + directory.size();
  file.insert(file.end(), directory.begin(), directory.end());
  if (wide) {
    put(file, 0x06064b50, 4);
    put(file, 44, 8);
    put(file, 0, 2 + 2 + 4 + 4);
    put(file, entries.size(), 8);
    put(file, entries.size(), 8);
    put(file, directory.size(), 8);
    put(file, at, 8);
    put(file, 0x07064b50, 4);
    put(file, 0, 4);
    put(file, end, 8);
    put(file, 1, 4);
  }
  put(file, 0x06054b50, 4);
  put(file, 0, 4);
  put(file, wide ? UINT16_MAX : entries.size(), 2);
  put(file, wide ? UINT16_MAX : entries.size(), 2);
  put(file, wide ? UINT32_MAX : directory.size(), 4);
  put(file, wide ? UINT32_MAX : at, 4);
  put(file, 0, 2);
  return file;
}

bool repair_checksum(FileBytes& file) {
  if (file.size() < header_size)
    return false;
  put<uint64_t>(file, 48, 0);
  const uint64_t seed = lapilli_checksum(file.data(), header_size, 0);
  put<uint64_t>(file, 48, lapilli_checksum(file.data() + header_size, file.size() - header_size, seed));
  return true;
}

uint32_t MethodBuilder::add(schema::ExprOp op, int64_t value, uint32_t a, uint32_t b) {
  method.exprs.emplace_back(value, a, b, op);
  return static_cast<uint32_t>(method.exprs.size() - 1);
}

uint32_t MethodBuilder::symbol(const std::string& name, int64_t min, int64_t max, uint32_t input, uint32_t axis) {
  auto symbol = std::make_unique<schema::SymbolT>();
  symbol->name = name;
  symbol->min = min;
  symbol->max = max;
  symbol->input = input;
  symbol->axis = axis;
  method.symbols.push_back(std::move(symbol));
  return add(schema::ExprOp::symbol, static_cast<int64_t>(method.symbols.size() - 1), 0, 0);
}

uint32_t MethodBuilder::given(const std::string& name, int64_t min, int64_t max) {
  const uint32_t made = symbol(name, min, max, 0, 0);
  method.symbols.back()->given = true;
  return made;
}

static std::unique_ptr<schema::TensorSpecT> tensor(const std::string& name, std::vector<uint32_t> shape,
                                                   schema::DType dtype) {
  auto spec = std::make_unique<schema::TensorSpecT>();
  spec->name = name;
  spec->dtype = dtype;
  spec->shape = std::move(shape);
  return spec;
}

void MethodBuilder::input(const std::string& name, std::vector<uint32_t> shape, schema::DType dtype) {
  method.inputs.push_back(tensor(name, std::move(shape), dtype));
}

void MethodBuilder::output(const std::string& name, std::vector<uint32_t> shape, schema::DType dtype) {
  method.outputs.push_back(tensor(name, std::move(shape), dtype));
}

uint32_t PlanBuilder::buffer(schema::BufferKind kind, uint32_t size, uint32_t index, uint32_t first, uint32_t last) {
  auto buffer = std::make_unique<schema::BufferT>();
  buffer->kind = kind;
  buffer->size = size;
  buffer->index = index;
  buffer->first = first;
  buffer->last = last;
  buffer->name = "buffer " + std::to_string(plan.buffers.size());
  plan.buffers.push_back(std::move(buffer));
  return static_cast<uint32_t>(plan.buffers.size() - 1);
}

schema::DispatchT& PlanBuilder::dispatch(bool load, uint32_t kernel, std::vector<Bound> bindings,
                                         std::vector<uint32_t> params, uint32_t groups_x, uint32_t one, bool barrier,
                                         const std::string& label) {
  auto dispatch = std::make_unique<schema::DispatchT>();
  dispatch->kernel = kernel;
  for (size_t i = 0; i < bindings.size(); ++i) {
    dispatch->bindings.emplace_back(bindings[i].buffer, 0u, bindings[i].size);
    dispatch->written |= bindings[i].written ? 1u << i : 0u;
  }
  dispatch->params = std::move(params);
  dispatch->groups_x = groups_x;
  dispatch->groups_y = dispatch->groups_z = one;
  dispatch->barrier = barrier;
  dispatch->label = label;
  auto& commands = load ? plan.load : plan.run;
  commands.push_back(std::move(dispatch));
  return *commands.back();
}

FileBytes sample_program(const SampleOptions& options) {
  using schema::BufferKind;
  ProgramBuilder builder;
  const uint32_t add = builder.kernel("add", kernels::add, 3);
  const uint32_t scale = builder.kernel("scale", kernels::scale, 2);
  const uint32_t doubling = options.texel
                                ? builder.kernel("scale_texel", kernels::scale_texel, 2, 64,
                                                 {schema::BindingType::texel_float32, schema::BindingType::storage})
                                : scale;
  builder.program.kernels.back()->format = static_cast<schema::KernelFormat>(options.format);
  std::vector<float> weights(options.width), added(options.width);
  for (uint32_t i = 0; i < options.width; ++i) {
    weights[i] = static_cast<float>(i);
    added[i] = static_cast<float>(5 + i / 8);
  }
  const uint32_t w = builder.constant("w", weights);
  const uint32_t c = builder.constant("c", added);

  MethodBuilder m;
  m.method.name = "forward";
  uint32_t batch = m.symbol("N", 0, options.max_batch, 0, 0);
  m.method.symbols.back()->factor = options.factor;
  m.method.symbols.back()->offset = options.offset;
  if (options.factor != 1)
    batch = m.times(batch, options.factor);
  if (options.offset != 0)
    batch = m.op(schema::ExprOp::add, batch, m.number(options.offset));
  const uint32_t width = m.number(options.width);
  const uint32_t one = m.number(1);
  const uint32_t items = m.op(schema::ExprOp::mul, batch, width);
  const uint32_t bytes = m.times(items, 4);
  const uint32_t weight_bytes = m.number(4 * options.width);
  m.input("x", {batch, width});
  m.output("y", {batch, width});

  const auto make_plan = [&](const std::string& name, uint32_t last) {
    auto p = std::make_unique<PlanBuilder>(name);
    if (options.subgroup_operations != 0) {
      p->plan.requirements = std::make_unique<schema::RequirementsT>();
      p->plan.requirements->subgroup_operations = options.subgroup_operations;
    }
    const uint32_t given = p->buffer(BufferKind::load_constant, weight_bytes, w);
    const uint32_t packed = p->buffer(BufferKind::packed, weight_bytes);
    const uint32_t c_buffer = p->buffer(BufferKind::constant, weight_bytes, c);
    const uint32_t x = p->buffer(BufferKind::input, bytes);
    const uint32_t t1 = p->buffer(BufferKind::arena, bytes, 0, 0, 1);
    const uint32_t t2 = p->buffer(BufferKind::arena, bytes, 0, 1, 2);
    const uint32_t y = p->buffer(BufferKind::output, bytes);
    if (options.scratch > 0)
      p->buffer(BufferKind::arena, m.number(options.scratch), 0, 0, 0);
    p->dispatch(true, scale, {{given, weight_bytes}, {packed, weight_bytes, true}}, {width, m.number(3)},
                m.number((options.width + 63) / 64), one, false, "pack w");
    const uint32_t groups = m.groups(items, 64);
    p->dispatch(false, add, {{x, bytes}, {packed, weight_bytes}, {t1, bytes, true}}, {items, width}, groups, one, false,
                "x + 3 w")
        .flops = items;
    p->dispatch(false, doubling, {{t1, bytes}, {t2, bytes, true}}, {items, m.number(2)}, groups, one, true, "times 2");
    p->dispatch(false, last, {{t2, bytes}, {c_buffer, weight_bytes}, {y, bytes, true}}, {items, width}, groups, one,
                true, "plus c");
    return p;
  };
  if (options.impossible_first || options.impossible_only) {
    auto plan = make_plan("impossible", add);
    plan->plan.requirements = std::make_unique<schema::RequirementsT>();
    plan->plan.requirements->max_workgroup_invocations = 1u << 30;
    plan->plan.requirements->features = uint64_t{1} << 40;
    m.method.plans.push_back(std::make_unique<schema::PlanT>(plan->plan));
  }
  if (options.fast_first) {
    const uint32_t fast = builder.kernel("fast", kernels::add, 3);
    auto plan = make_plan("fast", fast);
    if (options.fast_range > 0) {
      plan->plan.requirements = std::make_unique<schema::RequirementsT>();
      plan->plan.requirements->storage_range = options.fast_range;
    }
    m.method.plans.push_back(std::make_unique<schema::PlanT>(plan->plan));
  }
  if (!options.impossible_only)
    m.method.plans.push_back(std::make_unique<schema::PlanT>(make_plan("portable", add)->plan));
  builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  auto entry = std::make_unique<schema::MetadataT>();
  entry->key = "labels";
  entry->value = "[\"a\", \"b\"]";
  builder.program.metadata.push_back(std::move(entry));
  return builder.finish();
}

float sample_result(float x, uint32_t column) {
  return 2.0f * (x + 3.0f * static_cast<float>(column)) + static_cast<float>(5 + column / 8);
}

FileBytes checked_program(const CheckOptions& options) {
  using schema::BufferKind;
  ProgramBuilder builder;
  const uint32_t scale = builder.kernel("scale", kernels::scale, 2);
  MethodBuilder m;
  m.method.name = "forward";
  m.method.checks = {"sum"};
  m.method.integer_limit = options.limit;
  const uint32_t four = m.number(4), bytes = m.number(16), one = m.number(1);
  m.input("x", {four});
  m.output("y", {four});
  PlanBuilder p("portable");
  const uint32_t x = p.buffer(BufferKind::input, bytes);
  const uint32_t y = p.buffer(BufferKind::output, bytes);
  p.dispatch(false, scale, {{x, bytes}, {y, bytes, true}}, {four, one}, one, one, false, "y");
  if (options.result) {
    m.output("checks", {}, schema::DType::int32);
    const uint32_t failed = p.buffer(BufferKind::output, four, 1);
    p.dispatch(false, scale, {{x, four}, {failed, four, true}}, {one, one}, one, one, false, "checks");
  }
  m.method.plans.push_back(std::make_unique<schema::PlanT>(p.plan));
  builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  return builder.finish();
}

FileBytes state_program(const StateOptions& options) {
  using schema::BufferKind;
  ProgramBuilder builder;
  const uint32_t add = builder.kernel("add", kernels::add, 3);
  const uint32_t scale = builder.kernel("scale", kernels::scale, 2);
  const float initial[] = {1, 2, 3, 4};
  const uint32_t c = builder.constant("initial", initial);
  builder.state("total", options.size, options.constant);
  builder.state(options.second, options.size, -1);
  builder.program.host_operators = options.host_operators;
  const auto finish = [&](MethodBuilder& m, const PlanBuilder& p) {
    m.method.plans.push_back(std::make_unique<schema::PlanT>(p.plan));
    builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  };
  {
    MethodBuilder m;
    m.method.name = "add";
    const uint32_t four = m.number(4), bytes = m.number(16), one = m.number(1);
    m.input("x", {four});
    m.output("y", {four});
    PlanBuilder p("portable");
    const uint32_t state = p.buffer(BufferKind::state, m.number(options.buffer_bytes));
    const uint32_t x = p.buffer(BufferKind::input, bytes);
    const uint32_t y = p.buffer(BufferKind::output, bytes);
    p.dispatch(false, add, {{x, bytes}, {state, bytes}, {state, bytes, true}}, {four, four}, one, one, false,
               "total += x");
    p.dispatch(false, scale, {{state, bytes}, {y, bytes, true}}, {four, one}, one, one, true, "total");
    if (options.load) {
      const uint32_t packed = p.buffer(BufferKind::packed, bytes);
      p.dispatch(true, scale, {{state, bytes}, {packed, bytes, true}}, {four, one}, one, one, false, "too early");
    }
    finish(m, p);
  }
  {
    MethodBuilder m;
    m.method.name = "total";
    const uint32_t four = m.number(4), bytes = m.number(16), one = m.number(1);
    m.output("y", {four});
    PlanBuilder p("portable");
    const uint32_t state = p.buffer(BufferKind::state, bytes);
    const uint32_t y = p.buffer(BufferKind::output, bytes);
    p.dispatch(false, scale, {{state, bytes}, {y, bytes, true}}, {four, one}, one, one, false, "total");
    finish(m, p);
  }
  for (const bool sized : {true, false}) {
    MethodBuilder m;
    m.method.name = sized ? "size" : "nothing";
    const uint32_t n = m.given("N", 0, 4);
    PlanBuilder p("portable");
    if (sized) {
      const uint32_t bytes = m.times(n, 4), whole = m.number(16), one = m.number(1);
      m.output("y", {n});
      const uint32_t w = p.buffer(BufferKind::constant, whole, c);
      const uint32_t y = p.buffer(BufferKind::output, bytes);
      p.dispatch(false, scale, {{w, whole}, {y, bytes, true}}, {n, one}, one, one, false, "first N");
    }
    finish(m, p);
  }
  return builder.finish();
}

FileBytes sum_program() {
  using schema::BufferKind;
  ProgramBuilder builder;
  const uint32_t add = builder.kernel("add", kernels::add, 3);
  MethodBuilder m;
  m.method.name = "forward";
  const uint32_t n = m.symbol("N", 1, -1, 0, 0), bytes = m.times(n, 4);
  for (const char* name : {"a", "b"})
    m.input(name, {n});
  m.output("y", {n});
  PlanBuilder p("portable");
  const uint32_t a = p.buffer(BufferKind::input, bytes, 0), b = p.buffer(BufferKind::input, bytes, 1);
  const uint32_t y = p.buffer(BufferKind::output, bytes);
  p.dispatch(false, add, {{a, bytes}, {b, bytes}, {y, bytes, true}}, {n, n}, m.groups(n, 64), m.number(1), false,
             "sum");
  m.method.plans.push_back(std::make_unique<schema::PlanT>(p.plan));
  builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  return builder.finish();
}

FileBytes texel_program(uint32_t count) {
  using schema::BufferKind;
  ProgramBuilder builder;
  const uint32_t scale = builder.kernel("scale_texel", kernels::scale_texel, 2, 64,
                                        {schema::BindingType::texel_float32, schema::BindingType::storage});
  MethodBuilder m;
  m.method.name = "forward";
  const uint32_t n = m.number(count), bytes = m.number(4 * count);
  m.input("x", {n});
  m.output("y", {n});
  PlanBuilder p("portable");
  const uint32_t x = p.buffer(BufferKind::input, bytes), y = p.buffer(BufferKind::output, bytes);
  p.dispatch(false, scale, {{x, bytes}, {y, bytes, true}}, {n, m.number(2)}, m.groups(n, 64), m.number(1), false,
             "double");
  m.method.plans.push_back(std::make_unique<schema::PlanT>(p.plan));
  builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  return builder.finish();
}

FileBytes slow_program(uint32_t count) {
  ProgramBuilder builder;
  const uint32_t slow = builder.kernel("slow", kernels::slow, 2, 1);
  MethodBuilder m;
  m.method.name = "forward";
  const uint32_t one = m.number(1);
  const uint32_t items = m.number(count);
  const uint32_t bytes = m.number(4 * count);
  m.input("x", {one});
  m.output("y", {items});
  PlanBuilder p("portable");
  const uint32_t x = p.buffer(schema::BufferKind::input, m.number(4));
  const uint32_t y = p.buffer(schema::BufferKind::output, bytes);
  p.dispatch(false, slow, {{x, m.number(4)}, {y, bytes, true}}, {m.number(60), m.number(1000)}, items, one, false,
             "slow");
  m.method.plans.push_back(std::make_unique<schema::PlanT>(p.plan));
  builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  return builder.finish();
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

FileBytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  FileBytes bytes(file ? static_cast<size_t>(file.tellg()) : 0);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}
