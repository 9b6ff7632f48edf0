// Work that is shared among threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lapilli {

// Calls work(0) to work(count - 1), on this thread and on others where the system has them, and waits. Throws what the lowest
// index threw.
void parallel(size_t count, const std::function<void(size_t)>& work);

} // namespace lapilli
