#include "core/run.h"

#include "base/error.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

namespace {

constexpr uint64_t largest_arena_buffer = uint64_t{1} << 40; // beyond, sums could overflow

} // namespace

Paths choose_paths(const hal::Capabilities& device) {
  Paths paths{InputPath::direct, OutputPath::direct};
  if (device.is_discrete())
    paths.input = device.large_bar ? InputPath::bar : InputPath::staging;
  if (const auto wanted = environment("LAPILLI_INPUT_PATH")) {
    if (*wanted == "bar")
      paths.input = InputPath::bar;
    else if (*wanted == "staging")
      paths.input = InputPath::staging;
    else if (*wanted == "direct")
      paths.input = InputPath::direct;
    else
      fail(LAPILLI_INVALID_ARGUMENT, "LAPILLI_INPUT_PATH is \"", *wanted, "\"; it can be bar, staging or direct.");
  }
  if (const auto wanted = environment("LAPILLI_OUTPUT_PATH")) {
    if (*wanted == "staging")
      paths.output = OutputPath::staging;
    else if (*wanted != "direct")
      fail(LAPILLI_INVALID_ARGUMENT, "LAPILLI_OUTPUT_PATH is \"", *wanted, "\"; it can be staging or direct.");
  }
  return paths;
}

const char* name_of(InputPath path) {
  return path == InputPath::bar ? "bar" : path == InputPath::staging ? "staging" : "direct";
}

const char* name_of(OutputPath path) { return path == OutputPath::staging ? "staging" : "direct"; }

Run::Run(const Shared& shared, uint32_t method_index)
    : method(method_index), shared_(shared), resolved_(shared.plan.run.size()),
      commands_(shared.device.create_commands(shared.states.order())) {}

bool Run::prepared_for(std::span<const int64_t> symbols) const {
  return prepared_ && std::ranges::equal(symbols_, symbols);
}

void Run::prepare(std::span<const int64_t> symbols) {
  if (prepared_for(symbols))
    return;
  prepared_ = false;
  commands_->release();
  symbols_.assign(symbols.begin(), symbols.end());
  const Values values(shared_.method.exprs, symbols_);
  regions_.assign(shared_.constants.begin(), shared_.constants.end());
  for (size_t i = 0; i < regions_.size(); ++i)
    if (const Buffer& buffer = shared_.plan.buffers[i]; buffer.kind == BufferKind::state)
      regions_[i] = shared_.states.region(buffer.index);
  place_arena(values);
  place_tensors(values);
  for (size_t i = 0; i < resolved_.size(); ++i) {
    const Dispatch& command = shared_.plan.run[i];
    const Kernel& kernel = shared_.kernels[command.kernel];
    resolved_[i] = resolve(shared_.device.capabilities, command, kernel, values, regions_, shared_.limits.groups);
    widen(command, kernel, resolved_[i]);
  }
  record_all();
  prepared_ = true;
}

void Run::widen(const Dispatch& command, const Kernel& kernel, ResolvedDispatch& resolved) const {
  for (size_t i = 0; i < command.bindings.size() && !resolved.empty(); ++i) {
    const BufferKind kind = shared_.plan.buffers[command.bindings[i].buffer].kind;
    const bool ours = kind == BufferKind::arena || kind == BufferKind::input || kind == BufferKind::output;
    if (ours && kernel.types[i] == BindingType::storage)
      resolved.bindings[i].size += binding_slack();
  }
}

ArenaPlan plan_arena(const Shared& shared, const Values& values) {
  ArenaPlan result;
  const hal::Capabilities& device = shared.device.capabilities;
  for (uint32_t i = 0; i < shared.plan.buffers.size(); ++i) {
    const Buffer& buffer = shared.plan.buffers[i];
    if (buffer.kind != BufferKind::arena)
      continue;
    const uint64_t size = values.size(buffer.size, "the size of a buffer");
    if (size > std::min(largest_block(device), largest_arena_buffer))
      fail(LAPILLI_OUT_OF_MEMORY, "For these inputs the program needs a buffer of ", human_size(size), " (",
           buffer.name, "), and ", device.name, " allows ", human_size(device.max_allocation),
           ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
    result.buffers.push_back(i);
    result.lifetimes.push_back({size, buffer.first, buffer.last});
  }
  const uint64_t alignment = binding_alignment(device);
  result.plan = plan_memory(result.lifetimes, alignment, largest_block(device));
  return result;
}

void Run::place_arena(const Values& values) {
  const ArenaPlan arena = plan_arena(shared_, values);
  arena_.ensure(shared_.device, arena.plan.blocks, MemoryUse::device, shared_.counter, "temporary tensors");
  for (size_t i = 0; i < arena.buffers.size(); ++i)
    regions_[arena.buffers[i]] = arena_.region(arena.plan.places[i], arena.lifetimes[i].size);
  arena_planned_ = arena.plan.total;
  arena_sum_ = arena.plan.sum;
}

std::vector<Run::Tensor> Run::tensors(std::span<const TensorSpec> specs, const Values& values) const {
  std::vector<Tensor> result;
  for (const TensorSpec& spec : specs) {
    Tensor& tensor = result.emplace_back();
    for (const ExprIndex size : spec.shape)
      tensor.shape.push_back(static_cast<int64_t>(values.size(size, "a dimension")));
    check_file(tensor_bytes(tensor.shape, spec.dtype, tensor.bytes), "The program is damaged: \"", spec.name,
               "\" is too large for these inputs.");
  }
  return result;
}

// The buffers of which a command reads what it did not itself write there: they should be the device's own.
std::vector<bool> Run::read_buffers() const {
  std::vector<bool> result(shared_.plan.buffers.size());
  for (const Dispatch& command : shared_.plan.run)
    for (size_t i = 0; i < command.bindings.size(); ++i)
      if ((command.written >> i & 1) == 0)
        result[command.bindings[i].buffer] = true;
  return result;
}

// Above this a copy by the device is faster than a kernel that writes over the bus.
constexpr uint64_t large_output = uint64_t{256} << 10;

// Inputs and outputs are laid one after the other, in host memory and, where a copy is made, in device memory too.
void Run::place_tensors(const Values& values) {
  const hal::Capabilities& device = shared_.device.capabilities;
  const uint64_t alignment = binding_alignment(device);
  inputs_ = tensors(shared_.method.inputs, values);
  outputs_ = tensors(shared_.method.outputs, values);
  std::vector<uint64_t> input_sizes, output_sizes, copied_sizes;
  std::vector<uint32_t> input_buffer(inputs_.size(), UINT32_MAX), output_buffer(outputs_.size());
  for (uint32_t i = 0; i < shared_.plan.buffers.size(); ++i) {
    const Buffer& buffer = shared_.plan.buffers[i];
    if (buffer.kind == BufferKind::input)
      input_buffer[buffer.index] = i;
    else if (buffer.kind == BufferKind::output)
      output_buffer[buffer.index] = i;
  }
  const auto size_of = [&](const Tensor& tensor, uint32_t buffer) {
    if (buffer == UINT32_MAX)
      return tensor.bytes; // an input that no command reads
    const uint64_t size = values.size(shared_.plan.buffers[buffer].size, "the size of a buffer");
    check_room(size, tensor.bytes, shared_.plan.buffers[buffer]);
    if (size > largest_block(device))
      fail(LAPILLI_OUT_OF_MEMORY, "An input or output of ", human_size(size), " is too large: ", device.name,
           " allows ", human_size(device.max_allocation),
           ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
    return size;
  };
  for (size_t i = 0; i < inputs_.size(); ++i)
    input_sizes.push_back(size_of(inputs_[i], input_buffer[i]));
  std::vector<uint32_t> copied(outputs_.size(), UINT32_MAX);
  const std::vector<bool> is_read = device.is_discrete() ? read_buffers() : std::vector<bool>();
  for (size_t i = 0; i < outputs_.size(); ++i) {
    output_sizes.push_back(size_of(outputs_[i], output_buffer[i]));
    if (shared_.paths.output == OutputPath::staging ||
        (device.is_discrete() && (output_sizes.back() > large_output || is_read[output_buffer[i]]))) {
      copied[i] = static_cast<uint32_t>(copied_sizes.size());
      copied_sizes.push_back(output_sizes.back());
    }
  }

  const uint64_t limit = largest_block(device);
  const MemoryPlan input_plan = plan_without_sharing(input_sizes, alignment, limit);
  const MemoryPlan output_plan = plan_without_sharing(output_sizes, alignment, limit);
  const MemoryPlan copied_plan = plan_without_sharing(copied_sizes, alignment, limit);
  const bool copy_inputs = shared_.paths.input == InputPath::staging;
  input_host_.ensure(shared_.device, input_plan.blocks,
                     shared_.paths.input == InputPath::bar ? MemoryUse::bar : MemoryUse::upload, shared_.counter,
                     "inputs");
  if (copy_inputs)
    input_device_.ensure(shared_.device, input_plan.blocks, MemoryUse::device, shared_.counter, "inputs");
  output_host_.ensure(shared_.device, output_plan.blocks, MemoryUse::readback, shared_.counter, "outputs");
  output_device_.ensure(shared_.device, copied_plan.blocks, MemoryUse::device, shared_.counter, "outputs");

  if (binding_slack() > 0)
    for (const GpuBuffer& block : input_host_.all())
      std::memset(block.mapped(), 0xff, block.size());
  uploads_.clear();
  downloads_.clear();
  direct_outputs_ = false;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Place& place = input_plan.places[i];
    Region region = input_host_.region(place, input_sizes[i]);
    inputs_[i].mapped = input_host_.mapped(place);
    // What lies between the tensor and the end of its buffer is zero.
    std::memset(inputs_[i].mapped + inputs_[i].bytes, 0, static_cast<size_t>(input_sizes[i] - inputs_[i].bytes));
    if (copy_inputs) {
      const Region on_device = input_device_.region(place, input_sizes[i]);
      if (input_sizes[i] > 0)
        uploads_.push_back({region, on_device});
      region = on_device;
    }
    if (input_buffer[i] != UINT32_MAX)
      regions_[input_buffer[i]] = region;
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const Place& place = output_plan.places[i];
    Region region = output_host_.region(place, output_sizes[i]);
    outputs_[i].mapped = output_host_.mapped(place);
    if (copied[i] != UINT32_MAX) {
      const Region on_device = output_device_.region(copied_plan.places[copied[i]], output_sizes[i]);
      if (output_sizes[i] > 0)
        downloads_.push_back({on_device, region});
      region = on_device;
    } else {
      direct_outputs_ = true;
    }
    regions_[output_buffer[i]] = region;
  }
}

void Run::record_uploads(hal::Commands& commands) {
  if (!shared_.states.empty()) // what the runs before this one left in the states
    commands.barrier(hal::compute | hal::Stage::transfer_write, hal::compute);
  commands.barrier(hal::Stage::host_write, hal::Stage::compute_read | hal::Stage::transfer_read);
  for (const Copy& copy : uploads_)
    commands.copy(copy.from, copy.to);
  if (!uploads_.empty())
    commands.barrier(hal::Stage::transfer_write, hal::Stage::compute_read);
}

void Run::record_downloads(hal::Commands& commands) {
  using enum hal::Stage;
  if (downloads_.empty())
    return commands.barrier(compute_write, host_read);
  commands.barrier(compute_write, transfer_read);
  for (const Copy& copy : downloads_)
    commands.copy(copy.from, copy.to);
  commands.barrier(direct_outputs_ ? compute_write | transfer_write : transfer_write, host_read);
}

// Commands first..last-1, with the barriers that the plan asks for. A command that is left out passes its barrier on.
void Run::record_dispatches(hal::Commands& commands, size_t first, size_t last) {
  bool wait = false, any = false;
  for (size_t i = first; i < last; ++i) {
    const Dispatch& command = shared_.plan.run[i];
    wait = wait || command.barrier;
    if (resolved_[i].empty())
      continue;
    if (wait && any)
      commands.barrier(hal::Stage::compute_write, hal::compute);
    wait = false;
    any = true;
    record(commands, shared_.pipelines[command.kernel], command, resolved_[i]);
  }
}

void Run::record_all() {
  commands_->begin();
  if (binding_slack() > 0) {
    for (const GpuBuffer& block : arena_.all())
      commands_->fill(block.region(0, block.size()), UINT32_MAX);
    commands_->barrier(hal::Stage::transfer_write, hal::compute | hal::Stage::transfer_write);
  }
  record_uploads(*commands_);
  record_dispatches(*commands_, 0, resolved_.size());
  record_downloads(*commands_);
  commands_->end();
}

void Run::submit() {
  commands_->submit();
  in_flight_ = true;
}

bool Run::wait(uint64_t timeout) {
  if (!in_flight_)
    return true;
  if (!commands_->wait(timeout))
    return false;
  output_host_.invalidate();
  in_flight_ = false;
  return true;
}

bool Run::settle() noexcept {
  try {
    if (in_flight_)
      commands_->wait(hal::no_timeout);
    in_flight_ = false;
    return true;
  } catch (...) {
    return false;
  }
}

uint64_t Run::io_size() const {
  return input_host_.size() + input_device_.size() + output_host_.size() + output_device_.size();
}

} // namespace lapilli
