#include "core/states.h"

#include "base/error.h"
#include "core/constant_loader.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

// A state has one place, however many methods use it.
States::States(hal::Device& of, const Model& model, std::span<const uint32_t> plans, MemoryCounter& counter)
    : device_(of), model_(model), counter_(counter) {
  if (model.states.empty())
    return;
  commands_ = device_.create_commands(hal::Order::submitted);
  std::vector<uint64_t> sizes, initial_sizes;
  for (const State& state : model.states)
    sizes.push_back(align_up(std::max<uint64_t>(state.bytes, 4), 4));
  const hal::Capabilities& device = device_.capabilities;
  const auto check_size = [&](uint64_t size, const std::string& name) {
    if (size > std::min(largest_block(device), device.device_memory))
      fail(LAPILLI_OUT_OF_MEMORY, device.name, " has ", human_size(device.device_memory), " of memory, and state \"",
           name, "\" of the program takes ", human_size(size), ". Choose another device with LAPILLI_DEVICE.");
  };
  for (size_t i = 0; i < sizes.size(); ++i)
    check_size(sizes[i], model.states[i].name);
  for (uint32_t m = 0; m < model.methods.size(); ++m) {
    const Method& method = model.methods[m];
    const Values values(method.exprs, std::vector<int64_t>(method.symbols.size()));
    for (const Buffer& buffer : method.plans[plans[m]].buffers)
      if (buffer.kind == BufferKind::state) {
        const uint64_t size = values.size(buffer.size, "the size of a state");
        check_room(size, model.states[buffer.index].bytes, buffer);
        check_size(size, model.states[buffer.index].name);
        sizes[buffer.index] = std::max(sizes[buffer.index], align_up(size, 4));
      }
  }
  for (size_t i = 0; i < sizes.size(); ++i)
    initial_sizes.push_back(model.states[i].constant < 0 ? 0 : sizes[i]);
  memory_.lay_out(device_, sizes, MemoryUse::device, counter_, "states");
  initial_memory_.lay_out(device_, initial_sizes, MemoryUse::device, counter_, "initial values of states");
  for (size_t i = 0; i < sizes.size(); ++i) {
    current_.push_back(memory_[i]);
    initial_.push_back(initial_memory_[i]);
  }
}

void States::load(ConstantLoader& loader) {
  for (size_t i = 0; i < initial_.size(); ++i)
    if (initial_[i].size > 0)
      loader.upload(model_.constants[static_cast<size_t>(model_.states[i].constant)], initial_[i]);
  loader.finish();
  reset();
}

template <class F> void States::run(F&& record) {
  commands_->begin();
  commands_->barrier(hal::compute | hal::Stage::transfer_write | hal::Stage::host_write,
                     hal::Stage::transfer_read | hal::Stage::transfer_write);
  record([&](const Region& from, const Region& to) { commands_->copy(from, to); });
  commands_->barrier(hal::Stage::transfer_write, hal::compute | hal::Stage::host_read);
  commands_->end();
  commands_->submit_and_wait();
}

void States::reset() {
  if (empty())
    return;
  run([&](const auto& copy) {
    for (size_t i = 0; i < current_.size(); ++i) {
      const Region& state = current_[i];
      if (initial_[i].size > 0)
        copy(initial_[i], state);
      else
        commands_->fill(state, 0);
    }
  });
  lost_ = false;
}

void States::read(uint32_t state, std::span<std::byte> to) {
  if (to.empty())
    return;
  const GpuBuffer host(device_, to.size(), MemoryUse::readback, counter_, "a copy of a state");
  run([&](const auto& copy) {
    copy({current_[state].buffer, current_[state].offset, to.size()}, host.region(0, to.size()));
  });
  host.invalidate();
  std::memcpy(to.data(), host.mapped(), to.size());
}

void States::write(uint32_t state, Bytes from) {
  if (from.empty())
    return;
  const GpuBuffer host(device_, from.size(), MemoryUse::upload, counter_, "a new value of a state");
  std::memcpy(host.mapped(), from.data(), from.size());
  run([&](const auto& copy) {
    copy(host.region(0, from.size()), {current_[state].buffer, current_[state].offset, from.size()});
  });
}

GpuBuffer States::save() {
  uint64_t total = 0;
  for (const Region& state : current_)
    total += state.size;
  GpuBuffer kept(device_, total, MemoryUse::device, counter_, "a copy of the states");
  uint64_t offset = 0;
  run([&](const auto& copy) {
    for (const Region& state : current_) {
      copy(state, kept.region(offset, state.size));
      offset += state.size;
    }
  });
  return kept;
}

void States::restore(const GpuBuffer& kept) {
  const auto once = [&] {
    uint64_t offset = 0;
    run([&](const auto& copy) {
      for (const Region& state : current_) {
        copy(kept.region(offset, state.size), state);
        offset += state.size;
      }
    });
  };
  constexpr int tries = 3;
  for (int i = 1; i <= tries; ++i)
    try {
      return once();
    } catch (...) {
      if (i < tries && !device_.lost())
        continue;
      lose();
      throw;
    }
}

void States::need_all() const {
  if (lost_)
    fail(LAPILLI_DEVICE_LOST,
         "The states of this program are lost: memory ran out, and work that was to change them did "
         "not take place. Reset them (lapilli_reset), or load the program again.");
}

} // namespace lapilli
