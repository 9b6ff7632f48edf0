// Memory planning: buffers whose lifetimes do not overlap may lie in the same place.
#pragma once

#include "base/align.h"

#include <cstdint>
#include <span>
#include <vector>

namespace lapilli {

struct Lifetime {
  uint64_t size;
  uint32_t first, last; // commands, inclusive
};

struct Place {
  uint32_t block = 0;
  uint64_t offset = 0;
};

struct MemoryPlan {
  std::vector<Place> places;    // one per lifetime
  std::vector<uint64_t> blocks; // bytes of each block
  uint64_t total = 0;           // bytes of all blocks
  uint64_t sum = 0;             // bytes without sharing
  uint64_t lower_bound = 0;     // the most bytes that are alive at one command: no plan can be smaller
};

// Greedy: buffers one by one in a fixed order, each into the smallest gap between those placed earlier that are alive
// at the same time ("Efficient Memory Management for Deep Neural Net Inference", Pisarchyk and Lee, 2020, greedy by
// size). A few orders are tried and the smallest result is kept; the same input gives the same plan. `alignment` is a
// power of two; no block is larger than `block_limit`, so a buffer must not be either.
MemoryPlan plan_memory(std::span<const Lifetime> buffers, uint64_t alignment, uint64_t block_limit);

// One after the other without sharing.
MemoryPlan plan_without_sharing(std::span<const uint64_t> sizes, uint64_t alignment, uint64_t block_limit);

} // namespace lapilli
