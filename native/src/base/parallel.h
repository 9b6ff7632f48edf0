// Work that is shared among threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lapilli {

// Calls work(0) to work(count - 1), on this thread and on others where the system has them, and waits. Throws what the lowest
// index threw.
void parallel(size_t count, const std::function<void(size_t)>& work);

// Copies bytes that do not overlap. Many of them are shared among threads: one does not reach the memory's speed, and less so
// that of a device's memory behind a bus.
void copy_bytes(void* to, const void* from, size_t size);

} // namespace lapilli
