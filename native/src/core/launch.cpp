#include "core/launch.h"

#include "base/error.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr size_t most_launches = 1024; // of a method
constexpr uint64_t flops_per_byte = 16;

uint64_t bytes_of(const TensorSpec& spec, const Values& values) {
  std::vector<int64_t> shape;
  for (const ExprIndex size : spec.shape)
    shape.push_back(static_cast<int64_t>(values.size(size, "a dimension")));
  uint64_t bytes = 0;
  check_file(tensor_bytes(shape, spec.dtype, bytes), "The program is damaged: \"", spec.name,
             "\" is too large for these inputs.");
  return bytes;
}

} // namespace

void check_symbols(const Method& method, std::span<const int64_t> symbols) {
  if (symbols.size() != method.symbols.size())
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" has ", method.symbols.size(), " symbols, and ",
         symbols.size(), " values were given.");
  for (size_t i = 0; i < symbols.size(); ++i) {
    const Symbol& symbol = method.symbols[i];
    if (symbols[i] < symbol.min || (symbol.max >= 0 && symbols[i] > symbol.max))
      fail(LAPILLI_INVALID_ARGUMENT, "Symbol ", symbol.name, " of method \"", method.name, "\" is ", symbols[i],
           ", and the method takes ", symbol.min, symbol.max >= 0 ? cat("..", symbol.max) : " and more", ".");
  }
}

Launch::Launch(const Shared& shared, std::span<const int64_t> symbols) {
  const Method& method = shared.method;
  const Plan& plan = shared.plan;
  check_symbols(method, symbols);
  const Values values(method.exprs, symbols);
  for (const auto* specs : {&method.inputs, &method.outputs})
    for (const TensorSpec& spec : *specs) {
      const uint64_t bytes = bytes_of(spec, values);
      slots.push_back({bytes, bytes});
    }

  std::vector<Region> regions(shared.constants.begin(), shared.constants.end());
  std::vector<uint32_t> slot_of(regions.size(), fixed);
  const ArenaPlan arena = plan_arena(shared, values);
  const auto first_block = static_cast<uint32_t>(slots.size());
  for (const uint64_t block : arena.plan.blocks)
    slots.push_back({block, block});
  for (size_t i = 0; i < arena.buffers.size(); ++i) {
    const uint32_t buffer = arena.buffers[i];
    slot_of[buffer] = first_block + arena.plan.places[i].block;
    regions[buffer] = {nullptr, arena.plan.places[i].offset, arena.lifetimes[i].size};
  }
  for (size_t i = 0; i < regions.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    if (buffer.kind == BufferKind::state)
      regions[i] = shared.states.region(buffer.index);
    if (buffer.kind != BufferKind::input && buffer.kind != BufferKind::output)
      continue;
    const auto inputs = static_cast<uint32_t>(method.inputs.size());
    slot_of[i] = buffer.kind == BufferKind::input ? buffer.index : inputs + buffer.index;
    Slot& slot = slots[slot_of[i]];
    regions[i] = {nullptr, 0, values.size(buffer.size, "the size of a buffer")};
    check_room(regions[i].size, slot.tensor, buffer);
    slot.bound = std::max(slot.bound, regions[i].size);
  }

  bool wait = false;
  for (const Dispatch& dispatch : plan.run) {
    wait = wait || dispatch.barrier;
    const ResolvedDispatch resolved =
        resolve(shared.device.capabilities, dispatch, shared.kernels[dispatch.kernel], values, regions, shared.limits.groups);
    if (resolved.empty())
      continue;
    commands.push_back({&dispatch, resolved.groups, static_cast<uint32_t>(bindings.size()),
                        static_cast<uint32_t>(params.size()), wait && !commands.empty()});
    wait = false;
    params.insert(params.end(), resolved.params.begin(),
                  resolved.params.begin() + static_cast<ptrdiff_t>(dispatch.params.size()));
    for (size_t i = 0; i < dispatch.bindings.size(); ++i) {
      const uint32_t slot = slot_of[dispatch.bindings[i].buffer];
      bindings.push_back({resolved.bindings[i], slot});
      work += resolved.bindings[i].size;
      if (slot == fixed)
        continue;
      if ((dispatch.written >> i & 1) != 0)
        slots[slot].first_written = std::min(slots[slot].first_written, commands.size());
      else
        slots[slot].last_read = commands.size();
    }
    work += values.or_zero(dispatch.flops) / flops_per_byte;
  }
}

const Launch& Launches::get(const Shared& shared, std::span<const int64_t> symbols) {
  const auto found = launches_.find(symbols);
  if (found != launches_.end())
    return found->second;
  if (launches_.size() == most_launches)
    launches_.clear();
  return launches_.try_emplace(Symbols(symbols.begin(), symbols.end()), shared, symbols).first->second;
}

} // namespace lapilli
