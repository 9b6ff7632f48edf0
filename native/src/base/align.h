// Multiples.
#pragma once

#include <cstdint>

namespace lapilli {

// `alignment` is a power of two.
inline uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

} // namespace lapilli
