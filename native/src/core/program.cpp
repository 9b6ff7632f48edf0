#include "core/program.h"

#include "base/error.h"
#include "base/json.h"
#include "base/parallel.h"
#include "core/constant_loader.h"
#include "core/inputs.h"
#include "core/stream.h"
#include "format/describe.h"
#include "format/reader.h"

#include <algorithm>

namespace lapilli {

std::shared_ptr<Program> Program::load(const Source& file, const lapilli_load_options& options, uint64_t started,
                                       const OpenDevice& open, const Choose& choose) {
  const Limits limits = Limits::of(options.limits);
  const Container container(file, limits, options.skip_checksum == 0);
  return container.checked([&] { return load(container, options, started, open, choose); });
}

std::shared_ptr<Program> Program::load(const Container& container, const lapilli_load_options& options,
                                       uint64_t started, const OpenDevice& open, const Choose& choose) {
  Model model = read_model(container);
  if (!model.host_operators.empty() && options.allow_host == 0)
    fail(LAPILLI_UNSUPPORTED, "This program leaves ", listed(model.host_operators),
         " to torch on the CPU, which the player alone does not have. Load it in Python where torch is installed, or "
         "compile the model again with fallback=\"error\" and replace what that names.");
  const uint64_t opened = nanoseconds_now();
  const std::shared_ptr<Program> program(new Program(std::move(model), open(), container.limits));
  program->times_.open = opened - started;
  program->times_.device = nanoseconds_now() - opened;
  program->choose_plans(options.plan);
  if (choose && choose(*program) == Choice::plainest)
    program->plans_ = program->plainest_;
  program->prepare(container, options);
  program->times_.total = nanoseconds_now() - started;
  return program;
}

Program::Program(Model model, std::shared_ptr<hal::Device> device, const Limits& limits)
    : limits_(limits), counter_(std::min(limits.device_bytes, device->capabilities.all_memory)),
      model_(std::move(model)), device_(std::move(device)) {}

void Program::choose_plans(const char* wanted) {
  const hal::Capabilities& device = device_->capabilities;
  bool found_wanted = wanted == nullptr;
  std::vector<std::string> names;
  for (const Method& method : model_.methods) {
    const bool named =
        wanted != nullptr && std::ranges::any_of(method.plans, [&](const Plan& p) { return p.name == wanted; });
    found_wanted = found_wanted || named;
    std::vector<Rejected>& rejected = rejected_.emplace_back();
    uint32_t taken = UINT32_MAX, plainest = UINT32_MAX;
    const std::vector<bool> dynamic = symbolic(method.exprs);
    const Values values(method.exprs, std::vector<int64_t>(method.symbols.size()));
    for (uint32_t i = 0; i < method.plans.size(); ++i) {
      const Plan& plan = method.plans[i];
      names.push_back(plan.name);
      const bool may_be_taken = taken == UINT32_MAX && (!named || plan.name == wanted);
      Missing lacking = missing(device, plan, model_.kernels, values, dynamic);
      const bool possible = lacking.reasons.empty();
      // What is bound in parts where the plan before it binds it whole is slower, and no plainer.
      const bool parts = i > 0 && method.plans[i - 1].requirements.storage_range > 0;
      // Nor is what copies values so as to bind fewer buffers than the plan before it.
      const bool few = i > 0 && plainest == i - 1 && plan.name == method.plans[i - 1].name + "-few";
      if (possible && !(parts && plainest == i - 1) && !few)
        plainest = i;
      if (may_be_taken && possible)
        taken = i;
      else if (may_be_taken)
        rejected.push_back({plan.name, std::move(lacking), parts});
    }
    if (taken == UINT32_MAX)
      refuse(method, rejected);
    plans_.push_back(taken);
    plainest_.push_back(std::max(taken, plainest));
  }
  if (!found_wanted)
    fail(LAPILLI_INVALID_ARGUMENT, "The program has no plan \"", wanted, "\"; it has ", listed(names), ".");
}

// What no other plan would change is said alone: the program is compiled for such devices, and is too large for this one.
void Program::refuse(const Method& method, const std::vector<Rejected>& rejected) const {
  const hal::Capabilities& device = device_->capabilities;
  const std::string begin = cat(device.name, " cannot run method \"", method.name, "\" of this program");
  constexpr const char* smaller =
      " Compile the model for smaller inputs, or choose another device with LAPILLI_DEVICE.";
  uint64_t largest = 0, in_parts = UINT64_MAX;
  for (const Rejected& plan : rejected) {
    largest = std::max(largest, plan.missing.at_once);
    if (plan.parts && plan.missing.only_sizes)
      in_parts = std::min(in_parts, plan.missing.at_once);
  }
  if (device.device_memory > 0 && largest > device.device_memory)
    fail(LAPILLI_NO_DEVICE, begin, ": a value takes ", human_size(largest), ", and the device has ",
         human_size(device.device_memory), " of memory.", smaller);
  if (in_parts != UINT64_MAX)
    fail(LAPILLI_NO_DEVICE, begin, ": a value takes ", human_size(largest), "; even in parts a kernel needs ",
         human_size(in_parts), " of a buffer at once, and the device allows ", human_size(device.limits.storage_range),
         ".", smaller);
  std::string text;
  std::vector<std::string> said;
  for (const Rejected& first : rejected)
    for (const std::string& reason : first.missing.reasons) {
      if (std::ranges::find(said, reason) != said.end())
        continue;
      said.push_back(reason);
      std::vector<std::string> plans;
      for (const Rejected& plan : rejected)
        if (std::ranges::find(plan.missing.reasons, reason) != plan.missing.reasons.end())
          plans.push_back(cat("\"", plan.plan, "\""));
      text += cat(plans.size() > 1 ? " Plans " : " Plan ", listed(plans), ": ", reason, ".");
    }
  fail(LAPILLI_NO_DEVICE, begin, ".", text,
       " Choose another device with LAPILLI_DEVICE, or compile the model for this one.");
}

std::string Program::cache_folder_of(const lapilli_load_options& options) {
  return options.cache_dir != nullptr ? options.cache_dir : cache_folder();
}

void Program::prepare(const Container& file, const lapilli_load_options& options) {
  std::vector<bool> used(model_.kernels.size());
  for (uint32_t m = 0; m < model_.methods.size(); ++m)
    for (const auto* commands : {&plan(m).load, &plan(m).run})
      for (const Dispatch& command : *commands)
        used[command.kernel] = true;
  const Paths paths = choose_paths(device_->capabilities);
  const uint64_t start = nanoseconds_now();
  pipelines_ = device_->compile(model_.kernels, used, cache_folder_of(options));
  const uint64_t compiling = nanoseconds_now();
  constants_ = std::make_unique<Constants>(*device_, model_, plans_, counter_);
  states_ = std::make_unique<States>(*device_, model_, plans_, counter_);
  ConstantLoader loader(*device_, model_, file, options.staging_size, counter_);
  constants_->upload(loader); // while the driver compiles
  states_->load(loader);
  const uint64_t uploaded = nanoseconds_now();
  pipelines_->finish();
  const uint64_t compiled = nanoseconds_now();
  for (uint32_t m = 0; m < model_.methods.size(); ++m) {
    shared_.push_back({*device_, model_.methods[m], plan(m), model_.kernels, *pipelines_, constants_->regions(m), paths,
                       counter_, *states_, limits_});
    loader.pack(shared_.back(), constants_->repeated(m));
  }
  loader.finish();
  times_.pipelines = compiled - start;
  times_.constants = uploaded - compiling + (nanoseconds_now() - compiled);
  launches_.resize(shared_.size());
  for (Kernel& kernel : model_.kernels)
    kernel.code = {};
}

Program::~Program() { wait_for_all(); }

const Method& Program::method(uint32_t index) const {
  if (index >= model_.methods.size())
    fail(LAPILLI_INVALID_ARGUMENT, "There is no method ", index, ": the program has ", model_.methods.size(), ".");
  return model_.methods[index];
}

const Plan& Program::plan(uint32_t index) const { return method(index).plans[plans_[index]]; }

Run& Program::acquire(uint32_t method, std::span<const int64_t> symbols) {
  Run* run = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(abandoned_, [&](Run* late) {
      const bool finished = late->wait(0);
      if (finished)
        idle_.push_back(late);
      return finished;
    });
    // The one recorded for these sizes, else any of this method.
    auto found = std::ranges::find_if(
        idle_, [&](const Run* idle) { return idle->method == method && idle->prepared_for(symbols); });
    if (found == idle_.end())
      found = std::ranges::find_if(idle_, [&](const Run* idle) { return idle->method == method; });
    if (found != idle_.end()) {
      run = *found;
      idle_.erase(found);
    }
  }
  const auto prepare = [&] {
    if (run == nullptr) {
      auto created = std::make_unique<Run>(shared_[method], method);
      const std::lock_guard lock(mutex_);
      idle_.reserve(runs_.size() + 1); // so that release() does not allocate
      runs_.push_back(std::move(created));
      run = runs_.back().get();
    }
    run->prepare(symbols);
  };
  if (run != nullptr && run->prepared_for(symbols))
    return *run;
  try {
    try {
      prepare();
    } catch (const Error& error) {
      if (error.status != LAPILLI_OUT_OF_MEMORY)
        throw;
      discard_idle_runs(); // what they hold may be enough
      prepare();
    }
  } catch (...) {
    if (run != nullptr)
      release(*run);
    throw;
  }
  const std::lock_guard lock(mutex_);
  last_arena_ = run->arena_planned();
  last_arena_sum_ = run->arena_sum();
  return *run;
}

void Program::discard_idle_runs() {
  const std::lock_guard lock(mutex_);
  for (const Run* run : idle_)
    std::erase_if(runs_, [&](const auto& item) { return item.get() == run; });
  idle_.clear();
}

Run& Program::acquire_with(uint32_t index, const Given& given) {
  const Method& wanted = method(index);
  SymbolValues symbols;
  lapilli::read_symbols(wanted, given, symbols);
  Run& run = acquire(index, symbols.used());
  try {
    check_tensors(wanted, given.inputs, run.inputs(), symbols.used());
    for (size_t i = 0; i < given.inputs.size(); ++i)
      run.set_input(i, given.inputs[i].data);
  } catch (...) {
    release(run);
    throw;
  }
  return run;
}

// Lets what streams have recorded of this program begin.
void Program::flush_streams(const Stream* but) {
  if (!has_streams)
    return;
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard lock(launching_);
    if (streams_.empty() || (streams_.size() == 1 && streams_.front().first == but))
      return;
    for (const auto& [known, weak] : streams_)
      if (auto stream = known != but ? weak.lock() : nullptr)
        streams.push_back(std::move(stream));
  }
  for (const std::shared_ptr<Stream>& stream : streams)
    try {
      stream->flush();
    } catch (const Error& error) {
      if (error.status != LAPILLI_DEVICE_LOST) // where it lost what was to change the states, they know
        throw;
    }
}

void Program::leave_other_streams(const Stream& stream) {
  if (!states_->empty())
    flush_streams(&stream);
}

// Those that use states come one after the other.
std::unique_lock<std::mutex> Program::alone(Wanted wanted) {
  if (states_->empty())
    return {};
  flush_streams(nullptr);
  std::unique_lock lock(order_);
  if (wanted == Wanted::states)
    states_->need_all();
  return lock;
}

Program::Launching Program::launch(uint32_t index, std::span<const int64_t> symbols, Stream& stream) {
  method(index);
  std::unique_lock lock(launching_);
  if (!states_->empty()) {
    states_->need_all();
    if (std::ranges::none_of(streams_,
                             [&](const auto& known) { return known.first == &stream && !known.second.expired(); })) {
      std::erase_if(streams_, [](const auto& known) { return known.second.expired(); });
      streams_.emplace_back(&stream, stream.weak_from_this());
    }
  }
  const Launch& found = launches_[index].get(shared_[index], symbols);
  return {std::move(lock), found};
}

void Program::check_state(uint32_t state, uint64_t bytes) const {
  if (state >= model_.states.size())
    fail(LAPILLI_INVALID_ARGUMENT, "There is no state ", state, ": the program has ", model_.states.size(), ".");
  const State& found = model_.states[state];
  if (bytes != found.bytes)
    fail(LAPILLI_INVALID_ARGUMENT, "State \"", found.name, "\" has ", found.bytes, " bytes, and ", bytes,
         " were given.");
}

void Program::reset() {
  const std::unique_lock lock = alone(Wanted::anything);
  states_->reset();
}

void Program::read_state(uint32_t state, std::span<std::byte> to) {
  check_state(state, to.size());
  const std::unique_lock lock = alone();
  states_->read(state, to);
}

void Program::write_state(uint32_t state, Bytes from) {
  check_state(state, from.size());
  if (const State& found = model_.states[state]; found.dtype == DType::int64)
    check_integers(from, 0, [&] { return cat("State \"", found.name, "\" cannot be given"); });
  const std::unique_lock lock = alone();
  states_->write(state, from);
}

Run& Program::submit(uint32_t index, const Given& given) {
  Run& run = acquire_with(index, given);
  try {
    const std::unique_lock lock = alone();
    run.submit();
  } catch (...) {
    release(run);
    throw;
  }
  return run;
}

void Program::release(Run& run) noexcept {
  if (limits_.run_nanoseconds != hal::no_timeout)
    try {
      if (!run.wait(limits_.run_nanoseconds))
        return abandon(run);
    } catch (...) { // settle() finds the same
    }
  if (!run.settle())
    return; // it is not used again
  const std::lock_guard lock(mutex_);
  idle_.push_back(&run);
}

void Program::abandon(Run& run) {
  const std::lock_guard lock(mutex_);
  abandoned_.push_back(&run);
}

void Program::wait_for_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& run : runs_)
    run->settle(); // once the device is lost nothing runs any more
}

void Program::read_symbols(uint32_t index, std::span<const lapilli_tensor> inputs, std::span<int64_t> symbols) const {
  const Method& wanted = method(index);
  if (symbols.size() != wanted.symbols.size())
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", wanted.name, "\" has ", wanted.symbols.size(),
         " symbols, and room for ", symbols.size(), " was given.");
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < symbols.size(); ++i)
    if (wanted.symbols[i].given)
      sizes.push_back(symbols[i]);
  SymbolValues values;
  lapilli::read_symbols(wanted, {inputs, sizes}, values);
  std::ranges::copy(values.used(), symbols.begin());
}

SymbolValues Program::check_shapes(uint32_t index, const Given& given) const {
  const Method& wanted = method(index);
  SymbolValues symbols;
  lapilli::read_symbols(wanted, given, symbols);
  const Values values(wanted.exprs, symbols.used());
  for (size_t i = 0; i < given.inputs.size(); ++i) {
    const TensorSpec& spec = wanted.inputs[i];
    std::array<int64_t, max_rank> sizes{};
    for (size_t axis = 0; axis < spec.shape.size(); ++axis)
      sizes[axis] = values[spec.shape[axis]];
    const std::span<const int64_t> shape = std::span(sizes).first(spec.shape.size());
    uint64_t bytes = 0;
    check_file(tensor_bytes(shape, spec.dtype, bytes), "The program is damaged: input \"", spec.name,
               "\" is too large for these sizes.");
    check_tensor(wanted, i, given.inputs[i], shape, bytes, symbols.used());
  }
  return symbols;
}

void Program::output_tensors(uint32_t index, const Given& given, std::span<lapilli_tensor> outputs) {
  SymbolValues symbols;
  lapilli::read_symbols(method(index), given, symbols);
  output_tensors(index, symbols.used(), outputs);
}

void Program::output_tensors(uint32_t index, std::span<const int64_t> symbols, std::span<lapilli_tensor> outputs) {
  const Method& wanted = method(index);
  check_symbols(wanted, symbols);
  if (outputs.size() > wanted.outputs.size())
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", wanted.name, "\" has ", wanted.outputs.size(),
         " outputs, and the shapes of ", outputs.size(), " were asked for.");
  const Values values(wanted.exprs, symbols);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const TensorSpec& spec = wanted.outputs[i];
    outputs[i].rank = static_cast<uint32_t>(spec.shape.size());
    outputs[i].dtype = static_cast<uint32_t>(spec.dtype);
    for (size_t axis = 0; axis < spec.shape.size(); ++axis)
      outputs[i].shape[axis] = values[spec.shape[axis]];
    check_file(tensor_bytes(std::span(outputs[i].shape).first(spec.shape.size()), spec.dtype, outputs[i].size),
               "The program is damaged: output \"", spec.name, "\" is too large for these inputs.");
  }
}

void Program::profile(uint32_t index, const Given& given, uint32_t repeat, std::span<uint64_t> nanoseconds,
                      uint64_t& total) {
  Run& run = acquire_with(index, given);
  try {
    const std::unique_lock lock = alone();
    states_->preserve([&] { run.profile(repeat, nanoseconds, total); });
  } catch (...) {
    release(run);
    throw;
  }
  release(run);
}

void Program::read_buffer(uint32_t index, const Given& given, uint32_t command, uint32_t buffer,
                          std::span<std::byte> to) {
  Run& run = acquire_with(index, given);
  try {
    const std::unique_lock lock = alone();
    states_->preserve([&] { run.read_buffer(command, buffer, to); });
  } catch (...) {
    release(run);
    throw;
  }
  release(run);
}

std::string Program::describe() const { return lapilli::describe(model_, limits_.description_bytes); }

std::string Program::info() const {
  Json json;
  json.object([&] {
    json.key("device");
    hal::describe(device_->capabilities, device_->index, json);
    json.key("methods");
    json.array([&] {
      for (uint32_t m = 0; m < model_.methods.size(); ++m)
        json.object([&] {
          json.field("name", model_.methods[m].name);
          json.field("plan", plan(m).name);
          json.field("plan_index", plans_[m]);
          json.key("missing");
          json.array([&] {
            for (const Rejected& rejected : rejected_[m])
              json.object([&] {
                json.field("plan", rejected.plan);
                json.list("reasons", rejected.missing.reasons);
              });
          });
        });
    });
    std::vector<std::string> names;
    for (const State& state : model_.states)
      names.push_back(state.name);
    json.list("states", names);
    json.list("host_operators", model_.host_operators);
    json.field("input_path", name_of(shared_.front().paths.input));
    json.field("output_path", name_of(shared_.front().paths.output));
    json.key("pipeline_cache");
    json.object([&] {
      const hal::Pipelines::Cache cache = pipelines_->cache();
      json.field("file", cache.file);
      json.field("found", cache.found);
      json.field("compiled", cache.compiled);
    });
  });
  return json.text();
}

lapilli_memory_info Program::memory() const {
  const std::lock_guard lock(mutex_);
  uint64_t io = 0;
  for (const auto& run : runs_)
    io += run->io_size();
  return {constants_->size(), states_->size(), last_arena_, last_arena_sum_, io, counter_.load()};
}

} // namespace lapilli
