// Whether this process was forked from one that uses a driver of devices. What a child inherits of a driver (threads, queues, locks that
// another thread held) does not work, and waiting for it never ends.
#pragma once

#include <atomic>

namespace lapilli {

// From here on until it goes, or for ever, children of this process count as forked from one that uses a driver.
class DriverInUse {
public:
  DriverInUse();
  ~DriverInUse();
  DriverInUse(const DriverInUse&) = delete;
  DriverInUse& operator=(const DriverInUse&) = delete;
  void for_ever() { ends_ = false; }

private:
  bool ends_ = true;
};

namespace detail {
inline std::atomic<bool> forked{false};
}
inline bool is_forked() noexcept { return detail::forked.load(std::memory_order_relaxed); }

// Throws in such a child.
void refuse_in_child();

} // namespace lapilli
