// Work that is shared among threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lapilli {

// Calls work(0) to work(count - 1), on this thread and on others where the system has them, and waits. Throws what the lowest
// index threw.
void parallel(size_t count, const std::function<void(size_t)>& work);

// Calls work(first, number) for parts of `count` items of `size` bytes each. Many bytes are shared among threads: one does not
// reach the memory's speed, and less so that of a device's memory behind a bus.
void in_pieces(size_t count, size_t size, const std::function<void(size_t, size_t)>& work);

// Copies bytes that do not overlap, in pieces.
void copy_bytes(void* to, const void* from, size_t size);

} // namespace lapilli
