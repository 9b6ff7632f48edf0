#include "core/planner.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>

namespace lapilli {

namespace {

struct Occupied {
  uint64_t offset, end;
  uint32_t first, last;
};

using Block = std::vector<Occupied>; // by offset

// What a buffer takes. Where a texel view of it (whole elements of 4, 8 or 16 bytes) would have a size with zeros in bits
// 8 to 15, there is one step more, so that the view can be made longer: lavapipe's compiler takes those bits for a
// property of the view, and compiles a kernel again for each kind.
uint64_t room(uint64_t size, uint64_t alignment) {
  const uint64_t taken = align_up(std::max<uint64_t>(size, 1), alignment);
  const auto zeros = [](uint64_t view) { return (view >> 8 & 0xff) == 0; };
  return zeros(align_up(size, 4)) || zeros(align_up(size, 8)) || zeros(align_up(size, 16)) ? taken + alignment : taken;
}

constexpr uint64_t none = std::numeric_limits<uint64_t>::max();
constexpr size_t many_buffers = 8192;

// The start of the smallest gap that takes `size` bytes during first..last; otherwise the end of all that is alive
// then.
uint64_t best_offset(const Block& block, uint64_t size, uint32_t first, uint32_t last) {
  uint64_t best = none, best_gap = none, end = 0;
  for (const Occupied& other : block) {
    if (other.last < first || last < other.first)
      continue;
    if (other.offset > end) {
      const uint64_t gap = other.offset - end;
      if (gap >= size && gap < best_gap) {
        best = end;
        best_gap = gap;
      }
    }
    end = std::max(end, other.end);
  }
  return best == none ? end : best;
}

MemoryPlan place(std::span<const Lifetime> buffers, std::span<const uint32_t> order, uint64_t alignment,
                 uint64_t limit) {
  MemoryPlan plan;
  plan.places.resize(buffers.size());
  std::vector<Block> blocks;
  for (const uint32_t index : order) {
    const Lifetime& buffer = buffers[index];
    const uint64_t size = room(buffer.size, alignment);
    uint32_t block = 0;
    uint64_t offset = 0;
    for (;; ++block) {
      if (block == blocks.size()) {
        blocks.emplace_back();
        plan.blocks.push_back(0);
        offset = 0;
        break;
      }
      offset = best_offset(blocks[block], size, buffer.first, buffer.last);
      if (offset + size <= limit)
        break;
    }
    const Occupied placed{offset, offset + size, buffer.first, buffer.last};
    const auto at = std::ranges::upper_bound(blocks[block], offset, {}, &Occupied::offset);
    blocks[block].insert(at, placed);
    plan.blocks[block] = std::max(plan.blocks[block], offset + size);
    plan.places[index] = {block, offset};
  }
  plan.total = std::accumulate(plan.blocks.begin(), plan.blocks.end(), uint64_t{0});
  return plan;
}

void measure(MemoryPlan& plan, std::span<const Lifetime> buffers, uint64_t alignment) {
  std::vector<std::tuple<uint32_t, int, uint64_t>> events; // at each command births come before deaths
  for (const Lifetime& buffer : buffers) {
    const uint64_t size = room(buffer.size, alignment);
    plan.sum += size;
    events.emplace_back(buffer.first, 0, size);
    events.emplace_back(buffer.last, 1, size);
  }
  std::ranges::sort(events);
  uint64_t alive = 0;
  for (const auto& [command, death, size] : events) {
    alive = death != 0 ? alive - size : alive + size;
    plan.lower_bound = std::max(plan.lower_bound, alive);
  }
}

// By how much a buffer's end is beyond what would do for all.
uint64_t excess(const MemoryPlan& plan, std::span<const Lifetime> buffers, uint32_t i, uint64_t alignment,
                uint64_t bound) {
  const uint64_t end = plan.places[i].offset + room(buffers[i].size, alignment);
  return plan.places[i].block != 0 ? end : end > bound ? end - bound : 0;
}

// A search from the order that gave `best`: a buffer that ends beyond the bound changes places with one before it that
// lives at the same time, when that makes the sum of what is beyond no larger than it was a few steps ago (late acceptance
// hill climbing, Burke and Bykov, 2017). The number of steps is fixed, and with it the result; it keeps the search within a
// few hundred microseconds for 200 buffers.
void improve(MemoryPlan& best, std::vector<uint32_t> order, std::span<const Lifetime> buffers, uint64_t alignment,
             uint64_t limit, uint64_t bound) {
  constexpr size_t effort = 1 << 19;
  const size_t steps = effort / std::max<size_t>(buffers.size() * buffers.size(), 1);
  MemoryPlan plan = best;
  std::minstd_rand random;
  std::vector<uint32_t> beyond, earlier; // places in the order
  uint64_t sum = none;
  std::array<uint64_t, 16> memory;
  memory.fill(none);
  for (size_t step = 0; step < steps && best.total > bound; ++step) {
    beyond.clear();
    for (uint32_t k = 0; k < order.size(); ++k)
      if (excess(plan, buffers, order[k], alignment, bound) != 0)
        beyond.push_back(k);
    if (beyond.empty())
      return;
    const uint32_t moved = beyond[random() % beyond.size()];
    const Lifetime& life = buffers[order[moved]];
    earlier.clear();
    for (uint32_t k = 0; k < moved; ++k) {
      const Lifetime& other = buffers[order[k]];
      if (other.first <= life.last && life.first <= other.last)
        earlier.push_back(k);
    }
    if (earlier.empty())
      continue;
    const uint32_t with = earlier[random() % earlier.size()];
    std::swap(order[moved], order[with]);
    MemoryPlan next = place(buffers, order, alignment, limit);
    uint64_t other = 0;
    for (uint32_t k = 0; k < order.size(); ++k)
      other += excess(next, buffers, k, alignment, bound);
    uint64_t& before = memory[step % memory.size()];
    if (other > sum && other > before) {
      std::swap(order[moved], order[with]);
    } else {
      plan = std::move(next);
      sum = other;
      if (plan.total < best.total)
        best = plan;
    }
    before = sum;
  }
}

} // namespace

MemoryPlan plan_memory(std::span<const Lifetime> buffers, uint64_t alignment, uint64_t block_limit) {
  MemoryPlan measured;
  measure(measured, buffers, alignment);
  std::vector<uint32_t> first(buffers.size()), best_order;
  std::iota(first.begin(), first.end(), 0u);
  MemoryPlan best;
  best.total = none;
  const auto attempt = [&](auto compare, auto key) {
    if (best.total <= measured.lower_bound)
      return;
    std::vector<uint32_t> order = first;
    std::ranges::stable_sort(order, compare, key);
    if (MemoryPlan plan = place(buffers, order, alignment, block_limit); plan.total < best.total) {
      best = std::move(plan);
      best_order = std::move(order);
    }
  };
  const auto finished = [&] {
    best.sum = measured.sum;
    best.lower_bound = measured.lower_bound;
    return std::move(best);
  };
  const auto length = [&](uint32_t i) { return buffers[i].last - buffers[i].first; };
  attempt(std::greater{}, [&](uint32_t i) { return std::tuple(buffers[i].size, length(i)); });
  if (buffers.size() > many_buffers) // one attempt takes time by the square of their number
    return finished();
  attempt(std::greater{}, [&](uint32_t i) { return std::tuple(length(i), buffers[i].size); });
  attempt(std::less{}, [&](uint32_t i) { return std::tuple(buffers[i].first, ~buffers[i].size); });
  if (best.total > measured.lower_bound)
    improve(best, best_order, buffers, alignment, block_limit, measured.lower_bound);
  return finished();
}

MemoryPlan plan_without_sharing(std::span<const uint64_t> sizes, uint64_t alignment, uint64_t block_limit) {
  MemoryPlan plan;
  for (const uint64_t wanted : sizes) {
    const uint64_t size = room(wanted, alignment);
    if (plan.blocks.empty() || plan.blocks.back() + size > block_limit)
      plan.blocks.push_back(0);
    plan.places.push_back({static_cast<uint32_t>(plan.blocks.size() - 1), plan.blocks.back()});
    plan.blocks.back() += size;
    plan.sum += size;
  }
  plan.total = plan.lower_bound = plan.sum;
  return plan;
}

} // namespace lapilli
