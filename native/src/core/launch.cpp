#include "core/launch.h"

#include "base/error.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr size_t most_launches = 1024; // of a method
constexpr uint64_t flops_per_byte = 16;
constexpr uint64_t largest_arena_buffer = uint64_t{1} << 40; // beyond, sums could overflow

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

Launch::Launch(const Shared& shared, std::span<const int64_t> symbols, Rounding rounding, uint64_t slack) {
  check_symbols(shared.method, symbols);
  const Values values(shared.method.exprs, symbols);
  place(shared, values, rounding);
  add(shared, shared.plan.run, values, slack);
}

Launch Launch::of_load(const Shared& shared) {
  Launch launch;
  const Values values(shared.method.exprs, std::vector<int64_t>(shared.method.symbols.size()));
  for (size_t i = 0; i < shared.plan.buffers.size(); ++i) {
    const Buffer& buffer = shared.plan.buffers[i];
    launch.buffers.push_back({shared.constants[i], fixed});
    Bound& bound = launch.buffers.back();
    if (buffer.kind != BufferKind::load_constant)
      continue;
    bound = {{nullptr, 0, values.size(buffer.size, "the size of a constant")},
             static_cast<uint32_t>(launch.slots.size())};
    launch.slots.push_back({bound.region.size, bound.region.size});
  }
  launch.add(shared, shared.plan.load, values, 0);
  return launch;
}

void Launch::place(const Shared& shared, const Values& values, Rounding rounding) {
  const Method& method = shared.method;
  in_halves.resize(method.inputs.size());
  std::vector<uint32_t> rounded(shared.plan.buffers.size(), fixed); // by buffer of halves: the input
  if (rounding == Rounding::host)
    for (const Dispatch& dispatch : shared.plan.run)
      if (dispatch.rounds_input) {
        const auto [from, to] = rounded_by(dispatch);
        rounded[to] = shared.plan.buffers[from].index;
        in_halves[rounded[to]] = true;
      }
  for (const auto* specs : {&method.inputs, &method.outputs})
    for (const TensorSpec& spec : *specs) {
      std::vector<int64_t>& shape = shapes.emplace_back();
      for (const ExprIndex size : spec.shape)
        shape.push_back(static_cast<int64_t>(values.size(size, "a dimension")));
      uint64_t bytes = 0;
      check_file(tensor_bytes(shape, spec.dtype, bytes), "The program is damaged: \"", spec.name,
                 "\" is too large for these inputs.");
      if (slots.size() < in_halves.size() && in_halves[slots.size()])
        bytes /= 2;
      slots.push_back({bytes, bytes});
    }
  for (size_t i = 0; i < shared.plan.buffers.size(); ++i) {
    const Buffer& buffer = shared.plan.buffers[i];
    buffers.push_back({shared.constants[i], fixed});
    Bound& bound = buffers.back();
    if (buffer.kind == BufferKind::state)
      bound.region = shared.states.region(buffer.index);
    const auto inputs = static_cast<uint32_t>(method.inputs.size());
    if (buffer.kind == BufferKind::input && !in_halves[buffer.index])
      bound.slot = buffer.index;
    else if (buffer.kind == BufferKind::output)
      bound.slot = inputs + buffer.index;
    else
      bound.slot = rounded[i];
    if (bound.slot == fixed)
      continue;
    Slot& slot = slots[bound.slot];
    bound.region = {nullptr, 0, values.size(buffer.size, "the size of a buffer")};
    check_room(bound.region.size, slot.tensor, buffer);
    slot.bound = std::max(slot.bound, bound.region.size);
  }
  place_arena(shared, values);
}

void Launch::place_arena(const Shared& shared, const Values& values) {
  const hal::Capabilities& device = shared.device.capabilities;
  std::vector<uint32_t> indices;
  std::vector<Lifetime> lifetimes;
  for (uint32_t i = 0; i < shared.plan.buffers.size(); ++i) {
    const Buffer& buffer = shared.plan.buffers[i];
    if (buffer.kind != BufferKind::arena || buffers[i].slot != fixed)
      continue;
    const uint64_t size = values.size(buffer.size, "the size of a buffer");
    if (size > std::min(largest_block(device), largest_arena_buffer))
      fail(LAPILLI_OUT_OF_MEMORY, "For these inputs the program needs a buffer of ", human_size(size), " (",
           buffer.name, "), and ", device.name, " allows ", human_size(device.max_allocation),
           ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
    indices.push_back(i);
    lifetimes.push_back({size, buffer.first, buffer.last});
  }
  const MemoryPlan plan = plan_memory(lifetimes, binding_alignment(device), largest_block(device));
  const auto first_block = static_cast<uint32_t>(slots.size());
  for (const uint64_t block : plan.blocks)
    slots.push_back({block, block});
  for (size_t i = 0; i < indices.size(); ++i)
    buffers[indices[i]] = {{nullptr, plan.places[i].offset, lifetimes[i].size}, first_block + plan.places[i].block};
  arena_total = plan.total;
  arena_sum = plan.sum;
}

bool Launch::is_left_out(const Shared& shared, const Dispatch& dispatch) const {
  return dispatch.rounds_input && in_halves[shared.plan.buffers[rounded_by(dispatch).from].index];
}

void Launch::add(const Shared& shared, std::span<const Dispatch> dispatches, const Values& values, uint64_t slack) {
  std::vector<Region> regions;
  regions.reserve(buffers.size());
  for (const Bound& buffer : buffers)
    regions.push_back(buffer.region);
  bool wait = false;
  for (uint32_t index = 0; index < dispatches.size(); ++index) {
    const Dispatch& dispatch = dispatches[index];
    const Kernel& kernel = shared.kernels[dispatch.kernel];
    wait = wait || dispatch.barrier; // a command that is left out passes its barrier on
    if (is_left_out(shared, dispatch))
      continue;
    const ResolvedDispatch resolved =
        resolve(shared.device.capabilities, dispatch, kernel, values, regions, shared.limits.groups);
    if (resolved.empty())
      continue;
    commands.push_back({&dispatch, resolved.groups, static_cast<uint32_t>(bindings.size()),
                        static_cast<uint32_t>(params.size()), index, wait && !commands.empty()});
    wait = false;
    params.insert(params.end(), resolved.params.begin(),
                  resolved.params.begin() + static_cast<ptrdiff_t>(dispatch.params.size()));
    for (size_t i = 0; i < dispatch.bindings.size(); ++i) {
      const uint32_t slot = buffers[dispatch.bindings[i].buffer].slot;
      bindings.push_back({resolved.bindings[i], slot});
      Bound& bound = bindings.back();
      work += bound.region.size;
      if (slot == fixed)
        continue;
      slots[slot].reach = std::max(slots[slot].reach, bound.region.offset + bound.region.size);
      if (kernel.types[i] == BindingType::storage)
        bound.region.size += slack;
      if ((dispatch.written >> i & 1) != 0)
        slots[slot].first_written = std::min(slots[slot].first_written, commands.size());
      else
        slots[slot].last_read = commands.size();
    }
    work += values.or_zero(dispatch.flops) / flops_per_byte;
  }
}

size_t Launch::at(size_t index) const {
  return static_cast<size_t>(std::ranges::lower_bound(commands, index, {}, &Command::index) - commands.begin());
}

const Launch& Launches::get(const Shared& shared, std::span<const int64_t> symbols) {
  const auto found = launches_.find(symbols);
  if (found != launches_.end())
    return found->second;
  if (launches_.size() == most_launches)
    launches_.clear();
  return launches_.try_emplace(Symbols(symbols.begin(), symbols.end()), shared, symbols, Rounding::device)
      .first->second;
}

} // namespace lapilli
