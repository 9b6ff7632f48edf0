#include "core/run.h"

#include "base/error.h"
#include "base/halves.h"
#include "base/parallel.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

Run::Run(const Shared& shared, uint32_t method_index)
    : method(method_index), shared_(shared), commands_(shared.device.create_commands(shared.states.order())) {}

bool Run::prepared_for(std::span<const int64_t> symbols) const {
  return prepared_ && std::ranges::equal(symbols_, symbols);
}

void Run::prepare(std::span<const int64_t> symbols) {
  if (prepared_for(symbols))
    return;
  prepared_ = false;
  commands_->release();
  symbols_.assign(symbols.begin(), symbols.end());
  launch_.emplace(shared_, symbols_, Rounding::host, binding_slack());
  slots_.resize(launch_->slots.size());
  place_arena();
  place_tensors();
  record_all();
  prepared_ = true;
}

void Run::place_arena() {
  const size_t first = launch_->shapes.size(); // the blocks come after the tensors
  std::vector<uint64_t> blocks;
  for (const Launch::Slot& slot : std::span(launch_->slots).subspan(first))
    blocks.push_back(slot.bound);
  arena_.lay_out_apart(shared_.device, blocks, MemoryUse::device, shared_.counter, "temporary tensors");
  for (size_t i = 0; i < blocks.size(); ++i)
    slots_[first + i] = arena_[i];
}

// Above this a copy by the device is faster than a kernel that writes over the bus.
constexpr uint64_t large_output = uint64_t{256} << 10;

// What kernels read, too, should be the device's own.
bool Run::is_copied(size_t output) const {
  const Launch::Slot& slot = launch_->slots[shared_.method.inputs.size() + output];
  return shared_.paths.output == OutputPath::staging ||
         (shared_.device.capabilities.is_discrete() && (slot.bound > large_output || slot.last_read > 0));
}

// Inputs and outputs are laid one after the other, in host memory and, where a copy is made, in device memory too.
void Run::place_tensors() {
  const hal::Capabilities& device = shared_.device.capabilities;
  const size_t inputs = shared_.method.inputs.size(), outputs = shared_.method.outputs.size();
  std::vector<uint64_t> sizes, copied_sizes;
  constexpr size_t nowhere = SIZE_MAX;
  std::vector<size_t> copied(outputs, nowhere); // where an output is among those
  for (size_t i = 0; i < inputs + outputs; ++i) {
    sizes.push_back(launch_->slots[i].bound);
    if (sizes.back() > largest_block(device))
      fail(LAPILLI_OUT_OF_MEMORY, "An input or output of ", human_size(sizes.back()), " is too large: ", device.name,
           " allows ", human_size(device.max_allocation),
           ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
    if (i < inputs || !is_copied(i - inputs))
      continue;
    copied[i - inputs] = copied_sizes.size();
    copied_sizes.push_back(sizes.back());
  }

  const std::span<const uint64_t> input_sizes = std::span(sizes).first(inputs),
                                  output_sizes = std::span(sizes).subspan(inputs);
  const bool copy_inputs = shared_.paths.input == InputPath::staging;
  const auto lay_out = [&](PlannedMemory& memory, std::span<const uint64_t> of, MemoryUse use, const char* what) {
    memory.lay_out(shared_.device, of, use, shared_.counter, what);
  };
  lay_out(input_host_, input_sizes, shared_.paths.input == InputPath::bar ? MemoryUse::bar : MemoryUse::upload,
          "inputs");
  if (copy_inputs)
    lay_out(input_device_, input_sizes, MemoryUse::device, "inputs");
  lay_out(output_host_, output_sizes, MemoryUse::readback, "outputs");
  lay_out(output_device_, copied_sizes, MemoryUse::device, "outputs");
  io_size_ = input_host_.size() + input_device_.size() + output_host_.size() + output_device_.size();

  if (binding_slack() > 0)
    for (const GpuBuffer& block : input_host_.buffers())
      std::memset(block.mapped(), 0xff, block.size());
  inputs_.clear();
  outputs_.clear();
  uploads_.clear();
  downloads_.clear();
  direct_outputs_ = false;
  const auto tensor = [&](size_t i, const Region& on_host) {
    const bool in_halves = i < inputs && launch_->in_halves[i];
    return Tensor{launch_->shapes[i], launch_->slots[i].tensor * (in_halves ? 2 : 1), mapped(on_host), in_halves};
  };
  for (size_t i = 0; i < inputs; ++i) {
    slots_[i] = input_host_[i];
    const Tensor& input = inputs_.emplace_back(tensor(i, slots_[i]));
    // What lies between the tensor and the end of its buffer is zero.
    const uint64_t bytes = launch_->slots[i].tensor;
    std::memset(input.mapped + bytes, 0, static_cast<size_t>(sizes[i] - bytes));
    if (!copy_inputs)
      continue;
    if (sizes[i] > 0)
      uploads_.push_back({slots_[i], input_device_[i]});
    slots_[i] = input_device_[i];
  }
  for (size_t i = 0; i < outputs; ++i) {
    Region& slot = slots_[inputs + i] = output_host_[i];
    outputs_.push_back(tensor(inputs + i, slot));
    direct_outputs_ = direct_outputs_ || copied[i] == nowhere;
    if (copied[i] == nowhere)
      continue;
    const Region on_device = output_device_[copied[i]];
    if (slot.size > 0)
      downloads_.push_back({on_device, slot});
    slot = on_device;
  }
}

void Run::set_input(size_t index, const void* data) {
  const Tensor& input = inputs_[index];
  const auto bytes = static_cast<size_t>(input.bytes);
  if (bytes == 0)
    return;
  if (input.in_halves)
    round_to_halves(input.mapped, data, bytes / sizeof(float));
  else
    copy_bytes(input.mapped, data, bytes);
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

void Run::record_dispatches(hal::Commands& commands, size_t first, size_t last) {
  const Placed placed{*launch_, shared_.pipelines, slots_};
  recorder_.prepare(commands, placed, launch_->at(first), launch_->at(last));
  recorder_.record(commands, placed);
}

void Run::record_all() {
  commands_->begin();
  if (binding_slack() > 0) {
    for (const GpuBuffer& block : arena_.buffers())
      commands_->fill(block.region(0, block.size()), UINT32_MAX);
    commands_->barrier(hal::Stage::transfer_write, hal::compute | hal::Stage::transfer_write);
  }
  record_uploads(*commands_);
  record_dispatches(*commands_, 0, shared_.plan.run.size());
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

} // namespace lapilli
