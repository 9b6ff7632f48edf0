#include "core/constant_loader.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr uint64_t smallest_staging = uint64_t{64} << 10;
constexpr size_t piece_size = size_t{256} << 10; // fits into a cache

uint64_t enough_staging(const Model& model, uint64_t alignment, uint64_t most) {
  uint64_t total = 0;
  for (const Constant& constant : model.constants)
    total += std::min(align_up(constant.bytes, alignment), most);
  return std::clamp(total, smallest_staging, std::max(most, smallest_staging));
}

} // namespace

ConstantLoader::ConstantLoader(hal::Device& device, const Model& model, const Container& file, uint64_t staging_size,
                               MemoryCounter& counter)
    : device_(device), model_(model), file_(file), counter_(counter),
      alignment_(binding_alignment(device.capabilities)),
      staging_(device, enough_staging(model, alignment_, staging_size), alignment_, counter),
      batches_(device, hal::compute | hal::Stage::transfer_read) {}

// Bytes of a constant that is followed by zeros. Memory of a GPU is written by memcpy alone: the kernel's copies from files are
// slower there, which are made for memory that is cached.
void ConstantLoader::read(const Constant& constant, uint64_t offset, std::span<std::byte> to) {
  const auto there = static_cast<size_t>(
      offset < constant.bytes ? std::min<uint64_t>(to.size(), constant.bytes - offset) : uint64_t{0});
  const uint64_t begin = constant.offset + offset;
  if (device_.capabilities.is_cpu()) {
    file_.read(begin, to.first(there));
  } else {
    piece_.resize(std::max(piece_.size(), std::min(there, piece_size)));
    for (size_t done = 0; done < there; done += piece_.size()) {
      const auto piece = std::span(piece_).first(std::min(piece_.size(), there - done));
      file_.read(begin + done, piece);
      std::ranges::copy(piece, to.begin() + static_cast<std::ptrdiff_t>(done));
    }
  }
  std::ranges::fill(to.subspan(there), std::byte{0});
}

void ConstantLoader::upload(const Constant& constant, const Region& to) {
  if (std::byte* const bytes = mapped(to))
    return read(constant, 0, {bytes, static_cast<size_t>(to.size)});
  staging_.upload(batches_, to, [&](std::span<std::byte> bytes, uint64_t offset) { read(constant, offset, bytes); });
}

void ConstantLoader::finish() {
  batches_.finish();
  large_.clear();
}

void ConstantLoader::pack(const Shared& shared) {
  if (shared.plan.load.empty())
    return;
  const Launch launch = Launch::of_load(shared);
  for (size_t i = 0; i < launch.buffers.size(); ++i)
    if (const Buffer& buffer = shared.plan.buffers[i]; buffer.kind == BufferKind::load_constant)
      check_room(launch.buffers[i].region.size, model_.constants[buffer.index].bytes, buffer);
  batches_.submit(); // what was uploaded is there for the next batch
  std::vector<Region> slots(launch.slots.size());
  const Placed placed{launch, shared.pipelines, slots};
  for (size_t i = 0; i < launch.commands.size(); ++i) {
    hold(shared, launch, i, slots);
    Batch& batch = batches_.record();
    recorder_.prepare(batch.commands(), placed, i, i + 1);
    if (launch.commands[i].barrier)
      batch.commands().barrier(hal::Stage::compute_write, hal::compute);
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

// Makes the constants that a command reads available to it and places their slots. What is recorded so far is waited for where
// there is no room.
void ConstantLoader::hold(const Shared& shared, const Launch& launch, size_t index, std::span<Region> slots) {
  const Dispatch& command = *launch.commands[index].dispatch;
  std::vector<uint32_t> wanted = lacking(command, shared.plan);
  if (wanted.empty())
    return;
  batches_.submit_if_due();
  wanted = lacking(command, shared.plan);
  uint64_t bytes = 0;
  for (const uint32_t buffer : wanted)
    bytes += align_up(launch.buffers[buffer].region.size, alignment_);
  if (!staging_.fits(batches_, bytes) || !large_.empty()) {
    finish();
    wanted = lacking(command, shared.plan);
  }
  for (const uint32_t buffer : wanted) {
    const auto& [bound, slot] = launch.buffers[buffer];
    if (staging_.fits(batches_, bound.size))
      slots[slot] = staging_.take(batches_, bound.size);
    else
      slots[slot] = large_.emplace_back(device_, bound.size, MemoryUse::upload, counter_, "a constant to be packed")
                        .region(0, bound.size);
    read(model_.constants[shared.plan.buffers[buffer].index], 0,
         {mapped(slots[slot]), static_cast<size_t>(bound.size)});
    held_by_ = batches_.record().id();
    held_.insert(buffer);
  }
}

} // namespace lapilli
