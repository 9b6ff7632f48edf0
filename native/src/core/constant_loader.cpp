#include "core/constant_loader.h"

#include "base/parallel.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr uint64_t smallest_staging = uint64_t{64} << 10;
constexpr uint64_t default_staging = uint64_t{16} << 20, large_staging = uint64_t{64} << 20;
constexpr uint64_t cpu_staging = uint64_t{2} << 20; // there the copy costs nothing, and memory is the host's
constexpr uint64_t part_of_constants = 32;          // that the staging memory may be, where they are many
constexpr size_t read_at_once = size_t{512} << 10;
constexpr size_t worth_threads = size_t{2} << 20;

// `wanted`: 0 for as much as pays.
uint64_t enough_staging(const Model& model, const hal::Capabilities& device, uint64_t wanted) {
  const uint64_t alignment = binding_alignment(device);
  uint64_t total = 0;
  for (const Constant& constant : model.constants)
    total += std::min(align_up(constant.bytes, alignment), UINT64_MAX - total);
  const uint64_t most = wanted != 0       ? wanted
                        : device.is_cpu() ? cpu_staging
                                          : std::clamp(total / part_of_constants, default_staging, large_staging);
  return std::clamp(total, smallest_staging, std::max(most, smallest_staging));
}

} // namespace

ConstantLoader::ConstantLoader(hal::Device& device, const Model& model, const Container& file, uint64_t staging_size,
                               MemoryCounter& counter)
    : device_(device), model_(model), file_(file), counter_(counter),
      alignment_(binding_alignment(device.capabilities)),
      staging_(device, enough_staging(model, device.capabilities, staging_size), alignment_, counter),
      batches_(device, hal::compute | hal::Stage::transfer_read) {}

void ConstantLoader::read(const Constant& constant, uint64_t offset, std::span<std::byte> to) {
  for (size_t done = 0; done < to.size(); done += read_at_once)
    reads_.push_back({&constant, offset + done, to.subspan(done, std::min(read_at_once, to.size() - done))});
  waiting_ += to.size();
}

// Reading is a copy, mostly from memory to memory: one thread does not use what the bus can do.
void ConstantLoader::finish_reads() {
  const auto work = [&](size_t i) {
    const auto& [constant, offset, to] = reads_[i];
    const auto there = static_cast<size_t>(
        offset < constant->bytes ? std::min<uint64_t>(to.size(), constant->bytes - offset) : uint64_t{0});
    file_.read(constant->offset + offset, to.first(there));
    std::ranges::fill(to.subspan(there), std::byte{0}); // what follows a constant
  };
  if (waiting_ >= worth_threads)
    parallel(reads_.size(), work);
  else
    for (size_t i = 0; i < reads_.size(); ++i)
      work(i);
  reads_.clear();
  waiting_ = 0;
}

void ConstantLoader::upload(const Constant& constant, const Region& to) {
  if (std::byte* const bytes = mapped(to))
    return read(constant, 0, {bytes, static_cast<size_t>(to.size)});
  const uint64_t most = staging_.piece();
  for (uint64_t done = 0; done < to.size; done += most) {
    const uint64_t size = std::min(most, to.size - done);
    if (!staging_.fits(batches_, size))
      finish_reads(); // for what is recorded may be submitted
    const Region piece = staging_.take(batches_, size);
    read(constant, done, {mapped(piece), static_cast<size_t>(size)});
    batches_.record().copy(piece, {to.buffer, to.offset + done, size});
    if (waiting_ < most)
      continue;
    finish_reads();
    batches_.submit_if_due();
  }
}

void ConstantLoader::finish() {
  finish_reads();
  batches_.finish();
  large_used_ = 0;
}

void ConstantLoader::pack(const Shared& shared, const std::vector<bool>& done) {
  if (std::ranges::find(done, false) == done.end())
    return;
  const Launch launch = Launch::of_load(shared);
  for (size_t i = 0; i < launch.buffers.size(); ++i)
    if (const Buffer& buffer = shared.plan.buffers[i]; buffer.kind == BufferKind::load_constant)
      check_room(launch.buffers[i].region.size, model_.constants[buffer.index].bytes, buffer);
  finish_reads();
  batches_.submit(); // what was uploaded is there for the next batch
  std::vector<Region> slots(launch.slots.size());
  const Placed placed{launch, shared.pipelines, slots};
  bool wait = false;
  for (size_t i = 0; i < launch.commands.size(); ++i) {
    wait = wait || launch.commands[i].barrier; // a command that is left out passes its barrier on
    if (done[launch.commands[i].index])
      continue;
    hold(shared, launch, i, slots);
    Batch& batch = batches_.record();
    recorder_.prepare(batch.commands(), placed, i, i + 1);
    if (wait)
      batch.commands().barrier(hal::Stage::compute_write, hal::compute);
    wait = false;
    recorder_.record(batch.commands(), placed);
    batch.count(1, launch.work / launch.commands.size());
  }
  finish();
}

// The constants that a command reads and that are not in staging memory.
std::vector<uint32_t> ConstantLoader::lacking(const Dispatch& command, const Plan& plan) {
  if (batches_.id() != held_by_)
    held_.clear(); // another batch may write over them
  std::vector<uint32_t> result;
  for (const Binding& binding : command.bindings)
    if (plan.buffers[binding.buffer].kind == BufferKind::load_constant && !held_.contains(binding.buffer) &&
        std::ranges::find(result, binding.buffer) == result.end())
      result.push_back(binding.buffer);
  return result;
}

// Memory that is kept until all is loaded: to allocate it takes as long as to fill it.
Region ConstantLoader::outside_staging(uint64_t bytes) {
  const auto unused = large_.begin() + static_cast<std::ptrdiff_t>(large_used_);
  const auto found = std::ranges::find_if(unused, large_.end(), [&](const GpuBuffer& b) { return b.size() >= bytes; });
  if (found != large_.end()) {
    std::swap(*unused, *found);
  } else {
    if (unused != large_.end()) // it is too small
      large_.erase(unused);
    GpuBuffer made(device_, bytes, MemoryUse::upload, counter_, "a constant to be packed");
    large_.insert(large_.begin() + static_cast<std::ptrdiff_t>(large_used_), std::move(made));
  }
  return large_[large_used_++].region(0, bytes);
}

// Makes the constants that a command reads available to it and places their slots. What is recorded so far is waited for where
// there is no room.
void ConstantLoader::hold(const Shared& shared, const Launch& launch, size_t index, std::span<Region> slots) {
  const Dispatch& command = *launch.commands[index].dispatch;
  std::vector<uint32_t> wanted = lacking(command, shared.plan);
  if (wanted.empty())
    return;
  if (waiting_ >= staging_.piece()) {
    finish_reads();
    batches_.submit_if_due();
    wanted = lacking(command, shared.plan);
  }
  uint64_t bytes = 0;
  for (const uint32_t buffer : wanted)
    bytes += align_up(launch.buffers[buffer].region.size, alignment_);
  if (!staging_.fits(batches_, bytes) || large_used_ != 0) {
    finish();
    wanted = lacking(command, shared.plan);
  }
  for (const uint32_t buffer : wanted) {
    const auto& [bound, slot] = launch.buffers[buffer];
    if (staging_.fits(batches_, bound.size))
      slots[slot] = staging_.take(batches_, bound.size);
    else
      slots[slot] = outside_staging(bound.size);
    read(model_.constants[shared.plan.buffers[buffer].index], 0,
         {mapped(slots[slot]), static_cast<size_t>(bound.size)});
    held_by_ = batches_.record().id();
    held_.insert(buffer);
  }
}

} // namespace lapilli
