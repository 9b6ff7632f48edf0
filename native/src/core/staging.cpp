#include "core/staging.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

void copy_constant(std::byte* to, uint64_t size, const Container& file, const Constant& constant, uint64_t offset) {
  const uint64_t there = offset < constant.bytes ? std::min<uint64_t>(size, constant.bytes - offset) : 0;
  if (there > 0)
    file.read(constant.offset + offset, {to, static_cast<size_t>(there)});
  std::memset(to + there, 0, static_cast<size_t>(size - there));
}

Staging::Staging(hal::Device& device, uint64_t size, MemoryCounter& counter)
    : device_(device), counter_(counter),
      buffer_(device, size, device.capabilities.large_bar ? MemoryUse::bar : MemoryUse::upload, counter,
              "staging memory"),
      commands_(device.create_commands(hal::Order::any)) {}

hal::Commands& Staging::commands() {
  if (!recording_) {
    commands_->begin();
    commands_->barrier(hal::Stage::host_write, hal::Stage::compute_read | hal::Stage::transfer_read);
    recording_ = true;
  }
  return *commands_;
}

void Staging::flush() {
  if (recording_) {
    commands_->barrier(hal::Stage::compute_write | hal::Stage::transfer_write,
                       hal::compute | hal::Stage::transfer_read);
    commands_->end();
    recording_ = false;
    commands_->submit_and_wait();
    commands_->release();
  }
  used_ = 0;
  held_.clear();
  large_.clear();
}

void Staging::upload(const Container& file, const Constant& constant, const Region& to) {
  uint64_t done = 0;
  while (done < to.size) {
    if (used_ == buffer_.size())
      flush();
    const uint64_t size = std::min(buffer_.size() - used_, to.size - done);
    copy_constant(buffer_.mapped() + used_, size, file, constant, done);
    commands().copy(buffer_.region(used_, size), {to.buffer, to.offset + done, size});
    used_ = std::min(align_up(used_ + size, 16), buffer_.size());
    done += size;
  }
}

std::vector<uint32_t> Staging::lacking(const Dispatch& command, const Plan& plan) const {
  std::vector<uint32_t> result;
  for (const Binding& binding : command.bindings)
    if (plan.buffers[binding.buffer].kind == BufferKind::load_constant && !held_.contains(binding.buffer) &&
        std::ranges::find(result, binding.buffer) == result.end())
      result.push_back(binding.buffer);
  return result;
}

void Staging::hold(const Launch& launch, size_t index, const Plan& plan, const Model& model, std::span<Region> slots,
                   const Container& file) {
  const uint64_t alignment = binding_alignment(device_.capabilities);
  const Dispatch& command = *launch.commands[index].dispatch;
  std::vector<uint32_t> wanted = lacking(command, plan);
  uint64_t bytes = 0;
  for (const uint32_t buffer : wanted)
    bytes += align_up(launch.buffers[buffer].region.size, alignment);
  if (bytes > buffer_.size() - used_ || !large_.empty()) {
    flush();
    wanted = lacking(command, plan);
  }
  for (const uint32_t buffer : wanted) {
    const Constant& constant = model.constants[plan.buffers[buffer].index];
    const auto& [region, slot] = launch.buffers[buffer];
    const uint64_t size = region.size;
    std::byte* to = nullptr;
    if (align_up(size, alignment) <= buffer_.size() - used_) {
      slots[slot] = buffer_.region(used_, size);
      to = buffer_.mapped() + used_;
      used_ += align_up(size, alignment);
    } else {
      const GpuBuffer& large =
          large_.emplace_back(device_, size, MemoryUse::upload, counter_, "a constant to be packed");
      slots[slot] = large.region(0, size);
      to = large.mapped();
    }
    copy_constant(to, size, file, constant, 0);
    held_.insert(buffer);
  }
}

} // namespace lapilli
