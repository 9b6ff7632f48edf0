// Floats of 16 bits, as IEEE 754 has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lapilli {

// The nearest half, of two that are as near the even one; infinity from 65520 on.
uint16_t half_of(float value);

// Rounds `count` floats, which do not overlap the halves. Many of them are shared among threads, as by copy_bytes. Neither
// pointer has to be aligned.
void round_to_halves(void* to, const void* from, size_t count);

} // namespace lapilli
