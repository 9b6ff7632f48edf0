// The C ABI: every function turns exceptions into a status and a message of the calling thread.

#include "api/api.h"
#include "api/devices.h"
#include "base/fork.h"
#include "base/json.h"
#include "base/parallel.h"
#include "core/describe_memory.h"
#include "core/first_run.h"
#include "core/inputs.h"
#include "format/checksum.h"
#include "format/describe.h"
#include "format/reader.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#define LAPILLI_STRING(x) #x
#define LAPILLI_TEXT(x) LAPILLI_STRING(x)

namespace lapilli {

namespace {

struct LastError {
  std::string text;
  const char* message = "";
};
thread_local LastError last_error;

void remember(const char* message) noexcept {
  try {
    last_error.text = message;
    last_error.message = last_error.text.c_str();
  } catch (...) {
    last_error.message = "The machine is out of memory.";
  }
}

} // namespace

lapilli_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    remember(error.what());
    return error.status;
  } catch (const std::bad_alloc&) {
    remember("The machine is out of memory. Close other programs, or run smaller inputs.");
    return LAPILLI_OUT_OF_MEMORY;
  } catch (const std::length_error&) {
    remember("The machine is out of memory: a size is too large.");
    return LAPILLI_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    remember(error.what());
    return LAPILLI_INTERNAL;
  } catch (...) {
    remember("An unknown error occurred in the player.");
    return LAPILLI_INTERNAL;
  }
}

void fail_left_out(const char* part) {
  fail(LAPILLI_UNSUPPORTED, "This build of the player was made without this function. Build it with -DLAPILLI_", part,
       "=ON.");
}

void need(const void* pointer, const char* name) {
  if (pointer == nullptr)
    fail(LAPILLI_INVALID_ARGUMENT, "The argument `", name, "` is null.");
}

void give(const std::string& text, char** out) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr)
    throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
}

namespace {

template <size_t size> void put(std::string_view text, char (&to)[size]) {
  size_t length = std::min(text.size(), size - 1);
  while (length < text.size() && length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80)
    --length; // no half character
  std::copy_n(text.data(), length, to);
  to[length] = '\0';
}

} // namespace

void fill_device(const hal::Capabilities& device, uint32_t index, lapilli_device_info& info) {
  info = {};
  put(device.name, info.name);
  put(device.driver, info.driver);
  put(device.api_version, info.api_version);
  info.index = index;
  info.type = static_cast<uint32_t>(device.type);
  info.vendor_id = device.vendor_id;
  info.device_id = device.device_id;
  info.memory = device.device_memory;
  info.allocation = device.max_allocation;
  info.alignment = binding_alignment(device);
  info.host_alignment = device.host_alignment;
  std::ranges::copy(device.uuid, info.uuid);
}
static_assert(static_cast<int>(hal::DeviceType::cpu) == LAPILLI_DEVICE_CPU &&
              static_cast<int>(hal::DeviceType::discrete) == LAPILLI_DEVICE_DISCRETE);

Program& checked(lapilli_program* program) {
  need(program, "program");
  refuse_in_child();
  return *program->program;
}

namespace {

Bytes given_bytes(const void* data, uint64_t size) {
  need(data, "data");
  return {static_cast<const std::byte*>(data), static_cast<size_t>(size)};
}

void describe_source(const Source& source, bool verify, const lapilli_limits* given, char** json) {
  need(json, "json");
  const Limits limits = Limits::of(given);
  const Container container(source, limits, verify);
  give(container.checked([&] { return describe(read_model(container), limits.description_bytes); }), json);
}

void plan_source(const Source& source, bool verify, uint32_t method, uint32_t plan, std::span<const int64_t> symbols,
                 char** json) {
  need(json, "json");
  const Limits limits;
  const Container container(source, limits, verify);
  give(container.checked([&] { return describe_memory(read_model(container), method, plan, symbols); }), json);
}

void load(const Source& source, const lapilli_load_options* options, uint64_t started, lapilli_program** program) {
  const lapilli_load_options defaults{};
  auto handle = std::make_unique<lapilli_program>();
  const lapilli_load_options& given = options != nullptr ? *options : defaults;
  const OpenDevice open = [&] { return open_device(given); };
  if (given.first_run == 0)
    handle->program = Program::load(source, given, started, open);
  else if constexpr (has_first_run)
    handle->program = load_checked(source, given, started, open);
  else
    fail_left_out("FIRST_RUN");
  *program = handle.release();
}

Run& checked(lapilli_run* run) {
  need(run, "run");
  refuse_in_child();
  if (!run->program)
    fail(LAPILLI_INVALID_ARGUMENT, "This run was released already.");
  return static_cast<Run&>(*run);
}

void fill_spec(const Method& method, const TensorSpec& from, lapilli_spec& to) {
  to = {};
  to.name = from.name.c_str();
  to.dtype = static_cast<uint32_t>(from.dtype);
  to.rank = static_cast<uint32_t>(from.shape.size());
  const std::vector<bool> dynamic = symbolic(method.exprs);
  const Values values(method.exprs, std::vector<int64_t>(method.symbols.size()));
  for (uint32_t axis = 0; axis < to.rank; ++axis) {
    const ExprIndex index = from.shape[axis];
    const Expr& expr = method.exprs[index];
    to.shape[axis] = to.min[axis] = to.max[axis] = dynamic[index] ? -1 : values[index];
    if (expr.op == ExprOp::symbol) {
      to.min[axis] = method.symbols[static_cast<size_t>(expr.value)].min;
      to.max[axis] = method.symbols[static_cast<size_t>(expr.value)].max;
    }
  }
}

template <class Specs> const TensorSpec& at(const Specs& specs, uint32_t index, const char* what) {
  if (index >= specs.size())
    fail(LAPILLI_INVALID_ARGUMENT, "There is no ", what, " ", index, ": the method has ", specs.size(), ".");
  return specs[index];
}

// Throws OUT_OF_RANGE for the number of a check that failed, from 1.
void look_at_check(int32_t failed, const Method& method) {
  if (failed != 0)
    fail(LAPILLI_OUT_OF_RANGE, "The int64 results of ",
         failed > 0 && static_cast<size_t>(failed) <= method.checks.size()
             ? method.checks[static_cast<size_t>(failed) - 1]
             : std::string("an operator"),
         " do not fit into the 32 bits in which kernels compute integers (-2147483648..2147483647). Give smaller "
         "values, or "
         "leave this operator to PyTorch.");
}

// The same for a finished run.
void look_at_checks(const Run& run, const Method& method) {
  if (method.checks.empty())
    return;
  int32_t failed = 0;
  std::memcpy(&failed, run.outputs().back().mapped, sizeof failed);
  look_at_check(failed, method);
}

void fill_output(const Run& run, const Method& method, uint32_t index, lapilli_tensor& tensor) {
  const Run::Tensor& output = run.outputs()[index];
  tensor.size = output.bytes;
  tensor.rank = static_cast<uint32_t>(output.shape.size());
  tensor.dtype = static_cast<uint32_t>(method.outputs[index].dtype);
  std::ranges::copy(output.shape, tensor.shape);
}

void run_sync(Program& program, uint32_t index, const Given& given, std::span<lapilli_tensor> outputs) {
  const Method& method = program.method(index);
  if (outputs.size() != method.given_outputs().size())
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" has ", method.given_outputs().size(),
         " outputs, and room for ", outputs.size(), " was given.");
  bool enough = true;
  std::vector<lapilli_tensor> needed(outputs.begin(), outputs.end());
  program.output_tensors(index, given, needed);
  for (size_t i = 0; i < outputs.size(); ++i) {
    enough = enough && outputs[i].size >= needed[i].size && (outputs[i].data != nullptr || needed[i].size == 0);
    outputs[i] = needed[i];
  }
  if (!enough)
    fail(LAPILLI_INVALID_ARGUMENT,
         "An output buffer is null or too small; the needed sizes were written to `outputs`.");
  Run& run = program.submit(index, given);
  bool finished = true;
  try {
    finished = run.wait(program.limits().run_nanoseconds);
    if (!finished) {
      program.abandon(run);
      fail(LAPILLI_TIMEOUT, "The run is not finished after ", program.limits().run_nanoseconds / 1'000'000,
           " ms. It goes on, and closing the program waits for it.");
    }
    look_at_checks(run, method);
    for (uint32_t i = 0; i < outputs.size(); ++i) {
      fill_output(run, method, i, outputs[i]);
      if (outputs[i].size > 0)
        copy_bytes(outputs[i].data, run.outputs()[i].mapped, static_cast<size_t>(outputs[i].size));
    }
  } catch (...) {
    if (finished)
      program.release(run);
    throw;
  }
  program.release(run);
}

} // namespace

} // namespace lapilli

using namespace lapilli;

const char* lapilli_version(void) { return LAPILLI_TEXT(LAPILLI_VERSION); }

const char* lapilli_last_error(void) { return last_error.message; }

uint64_t lapilli_checksum(const void* data, uint64_t size, uint64_t seed) {
  return xxh64(data, data != nullptr ? static_cast<size_t>(size) : 0, seed);
}

void lapilli_free(void* p) { std::free(p); }

lapilli_status lapilli_devices(char** json) {
  return guarded_json([&] {
    need(json, "json");
    const hal::Driver* driver = find_driver();
    Json text;
    text.array([&] {
      for (uint32_t i = 0; driver != nullptr && i < driver->count(); ++i)
        hal::describe(driver->capabilities(i), i, text);
    });
    give(text.text(), json);
  });
}

lapilli_status lapilli_device_count(uint32_t* count) {
  return guarded([&] {
    need(count, "count");
    const hal::Driver* driver = find_driver();
    *count = driver != nullptr ? driver->count() : 0;
  });
}

lapilli_status lapilli_device(uint32_t index, lapilli_device_info* info) {
  return guarded([&] {
    need(info, "info");
    const hal::Driver* driver = find_driver();
    const uint32_t count = driver != nullptr ? driver->count() : 0;
    if (index >= count)
      fail(LAPILLI_NO_DEVICE, "There is no device ", index, ": this machine has ", count, ".");
    fill_device(driver->capabilities(index), index, *info);
  });
}

lapilli_status lapilli_load(const char* path, const lapilli_load_options* options, lapilli_program** program) {
  return guarded([&] {
    need(path, "path");
    need(program, "program");
    const uint64_t started = nanoseconds_now();
    load(Source(path), options, started, program);
  });
}

lapilli_status lapilli_load_memory(const void* data, uint64_t size, const lapilli_load_options* options,
                                   lapilli_program** program) {
  return guarded([&] {
    need(program, "program");
    const uint64_t started = nanoseconds_now();
    load(Source(given_bytes(data, size)), options, started, program);
  });
}

void lapilli_destroy(lapilli_program* program) {
  if (program == nullptr || is_forked())
    return;
  program->program->wait_for_all();
  delete program;
}

lapilli_status lapilli_describe(const void* data, uint64_t size, int32_t skip_checksum, const lapilli_limits* limits,
                                char** json) {
  return guarded_json([&] { describe_source(Source(given_bytes(data, size)), skip_checksum == 0, limits, json); });
}

lapilli_status lapilli_describe_file(const char* path, int32_t skip_checksum, const lapilli_limits* limits,
                                     char** json) {
  return guarded_json([&] {
    need(path, "path");
    describe_source(Source(path), skip_checksum == 0, limits, json);
  });
}

lapilli_status lapilli_program_describe(lapilli_program* program, char** json) {
  return guarded_json([&] {
    need(json, "json");
    give(checked(program).describe(), json);
  });
}

lapilli_status lapilli_program_info(lapilli_program* program, char** json) {
  return guarded_json([&] {
    need(json, "json");
    give(checked(program).info(), json);
  });
}

lapilli_status lapilli_program_device(lapilli_program* program, lapilli_device_info* info) {
  return guarded([&] {
    need(info, "info");
    const hal::Device& device = checked(program).device();
    fill_device(device.capabilities, device.index, *info);
  });
}

lapilli_status lapilli_program_memory(lapilli_program* program, lapilli_memory_info* info) {
  return guarded([&] {
    need(info, "info");
    *info = checked(program).memory();
  });
}

lapilli_status lapilli_program_load_times(lapilli_program* program, lapilli_load_times* times) {
  return guarded([&] {
    need(times, "times");
    *times = checked(program).load_times();
  });
}

const char* lapilli_program_warning(lapilli_program* program) {
  return program != nullptr ? program->program->warning().c_str() : "";
}

const char* lapilli_metadata(lapilli_program* program, const char* name) {
  if (program == nullptr || name == nullptr)
    return nullptr;
  const auto& entries = program->program->model().metadata;
  const auto found = std::ranges::find_if(entries, [&](const auto& entry) { return entry.first == name; });
  return found != entries.end() ? found->second.c_str() : nullptr;
}

uint32_t lapilli_method_count(lapilli_program* program) {
  return program != nullptr ? static_cast<uint32_t>(program->program->model().methods.size()) : 0;
}

lapilli_status lapilli_method(lapilli_program* program, uint32_t method, lapilli_method_info* info) {
  return guarded([&] {
    need(info, "info");
    const Method& found = checked(program).method(method);
    *info = {found.name.c_str(),
             static_cast<uint32_t>(found.inputs.size()),
             static_cast<uint32_t>(found.given_outputs().size()),
             static_cast<uint32_t>(program->program->plan(method).run.size()),
             static_cast<uint32_t>(found.symbols.size()),
             static_cast<uint32_t>(found.checks.size()),
             found.integer_limit};
  });
}

lapilli_status lapilli_symbol(lapilli_program* program, uint32_t method, uint32_t index, lapilli_symbol_info* info) {
  return guarded([&] {
    need(info, "info");
    const Method& found = checked(program).method(method);
    if (index >= found.symbols.size())
      fail(LAPILLI_INVALID_ARGUMENT, "There is no symbol ", index, ": the method has ", found.symbols.size(), ".");
    const Symbol& symbol = found.symbols[index];
    *info = {symbol.name.c_str(), symbol.min, symbol.max, symbol.given ? 1 : 0};
  });
}

lapilli_status lapilli_check_result(lapilli_program* program, uint32_t method, int32_t value) {
  return guarded([&] { look_at_check(value, checked(program).method(method)); });
}

lapilli_status lapilli_input_spec(lapilli_program* program, uint32_t method, uint32_t index, lapilli_spec* spec) {
  return guarded([&] {
    need(spec, "spec");
    const Method& found = checked(program).method(method);
    fill_spec(found, at(found.inputs, index, "input"), *spec);
  });
}

lapilli_status lapilli_output_spec(lapilli_program* program, uint32_t method, uint32_t index, lapilli_spec* spec) {
  return guarded([&] {
    need(spec, "spec");
    const Method& found = checked(program).method(method);
    fill_spec(found, at(found.given_outputs(), index, "output"), *spec);
  });
}

lapilli_status lapilli_symbols(lapilli_program* program, uint32_t method, const lapilli_tensor* inputs,
                               uint32_t n_inputs, int64_t* symbols, uint32_t n_symbols) {
  return guarded([&] {
    checked(program).read_symbols(method, items(inputs, n_inputs, "inputs"), items(symbols, n_symbols, "symbols"));
  });
}

lapilli_status lapilli_output_shapes(lapilli_program* program, uint32_t method, const int64_t* symbols,
                                     uint32_t n_symbols, lapilli_tensor* outputs, uint32_t n_outputs) {
  return guarded([&] {
    checked(program).output_tensors(method, items(symbols, n_symbols, "symbols"), items(outputs, n_outputs, "outputs"));
  });
}

uint32_t lapilli_state_count(lapilli_program* program) {
  return program != nullptr ? static_cast<uint32_t>(program->program->model().states.size()) : 0;
}

lapilli_status lapilli_state_spec(lapilli_program* program, uint32_t index, lapilli_spec* spec) {
  return guarded([&] {
    need(spec, "spec");
    const auto& states = checked(program).model().states;
    if (index >= states.size())
      fail(LAPILLI_INVALID_ARGUMENT, "There is no state ", index, ": the program has ", states.size(), ".");
    const State& found = states[index];
    *spec = {};
    spec->name = found.name.c_str();
    spec->dtype = static_cast<uint32_t>(found.dtype);
    spec->rank = static_cast<uint32_t>(found.shape.size());
    for (uint32_t axis = 0; axis < spec->rank; ++axis)
      spec->shape[axis] = spec->min[axis] = spec->max[axis] = found.shape[axis];
  });
}

lapilli_status lapilli_reset(lapilli_program* program) {
  return guarded([&] { checked(program).reset(); });
}

lapilli_status lapilli_state_read(lapilli_program* program, uint32_t index, void* data, uint64_t size) {
  return guarded([&] { checked(program).read_state(index, items(static_cast<std::byte*>(data), size, "data")); });
}

lapilli_status lapilli_state_write(lapilli_program* program, uint32_t index, const void* data, uint64_t size) {
  return guarded(
      [&] { checked(program).write_state(index, items(static_cast<const std::byte*>(data), size, "data")); });
}

lapilli_status lapilli_plan_memory(const void* data, uint64_t size, int32_t skip_checksum, uint32_t method,
                                   uint32_t plan, const int64_t* symbols, uint32_t n_symbols, char** json) {
  return guarded_json([&] {
    plan_source(Source(given_bytes(data, size)), skip_checksum == 0, method, plan, items(symbols, n_symbols, "symbols"),
                json);
  });
}

lapilli_status lapilli_plan_memory_file(const char* path, int32_t skip_checksum, uint32_t method, uint32_t plan,
                                        const int64_t* symbols, uint32_t n_symbols, char** json) {
  return guarded_json([&] {
    need(path, "path");
    plan_source(Source(path), skip_checksum == 0, method, plan, items(symbols, n_symbols, "symbols"), json);
  });
}

lapilli_status lapilli_run_sync(lapilli_program* program, uint32_t method, const lapilli_tensor* inputs,
                                uint32_t n_inputs, lapilli_tensor* outputs, uint32_t n_outputs) {
  return guarded([&] {
    run_sync(checked(program), method, {items(inputs, n_inputs, "inputs")}, items(outputs, n_outputs, "outputs"));
  });
}

lapilli_status lapilli_submit(lapilli_program* program, uint32_t method, const lapilli_tensor* inputs,
                              uint32_t n_inputs, lapilli_run** run) {
  return lapilli_submit_sized(program, method, nullptr, 0, inputs, n_inputs, run);
}

lapilli_status lapilli_submit_sized(lapilli_program* program, uint32_t method, const int64_t* sizes, uint32_t n_sizes,
                                    const lapilli_tensor* inputs, uint32_t n_inputs, lapilli_run** run) {
  return guarded([&] {
    need(run, "run");
    const Given given{items(inputs, n_inputs, "inputs"), items(sizes, n_sizes, "sizes")};
    Run& submitted = checked(program).submit(method, given);
    submitted.program = program->program;
    *run = &submitted;
  });
}

lapilli_status lapilli_wait(lapilli_run* run, uint64_t timeout) {
  return guarded([&] {
    Run& waited = checked(run);
    const uint64_t most = std::min(timeout, run->program->limits().run_nanoseconds);
    if (!waited.wait(most))
      fail(LAPILLI_TIMEOUT, "The run is not finished after ", most / 1'000'000,
           " ms. Wait for it again, or release it.");
    look_at_checks(waited, run->program->method(waited.method));
  });
}

lapilli_status lapilli_output(lapilli_run* run, uint32_t index, lapilli_tensor* tensor) {
  return guarded([&] {
    need(tensor, "tensor");
    const Run& finished = checked(run);
    const Method& method = run->program->method(finished.method);
    at(method.given_outputs(), index, "output");
    if (finished.in_flight())
      fail(LAPILLI_INVALID_ARGUMENT, "The run is not finished: call lapilli_wait first.");
    fill_output(finished, method, index, *tensor);
    tensor->data = finished.outputs()[index].mapped;
  });
}

void lapilli_release(lapilli_run* run) {
  if (run == nullptr || is_forked() || !run->program)
    return;
  const std::shared_ptr<Program> program = std::move(run->program);
  program->release(static_cast<Run&>(*run));
}

lapilli_status lapilli_profile(lapilli_program* program, uint32_t method, const lapilli_tensor* inputs,
                               uint32_t n_inputs, uint32_t repeat, uint64_t* nanoseconds, uint32_t n, uint32_t* count,
                               uint64_t* total) {
  return guarded_profiler([&] {
    need(count, "count");
    need(total, "total");
    const size_t commands = checked(program).plan(method).run.size();
    *count = static_cast<uint32_t>(commands);
    const auto times = items(nanoseconds, n, "nanoseconds");
    if (times.size() < commands)
      fail(LAPILLI_INVALID_ARGUMENT, "There is room for ", n, " times, and the plan has ", commands, " run commands.");
    program->program->profile(method, {items(inputs, n_inputs, "inputs")}, std::max(repeat, 1u), times, *total);
  });
}

lapilli_status lapilli_read_buffer(lapilli_program* program, uint32_t method, const lapilli_tensor* inputs,
                                   uint32_t n_inputs, uint32_t command, uint32_t buffer, void* data, uint64_t size) {
  return guarded_profiler([&] {
    checked(program).read_buffer(method, {items(inputs, n_inputs, "inputs")}, command, buffer,
                                 items(static_cast<std::byte*>(data), size, "data"));
  });
}
