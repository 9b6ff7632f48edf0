#include "base/fork.h"

#include "base/error.h"

#include <mutex>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace lapilli {

namespace {
std::atomic<int> in_use{0};
}

DriverInUse::DriverInUse() {
#if !defined(_WIN32)
  // The system tells of a fork, so that no call need ask which process it is in.
  static std::once_flag once;
  std::call_once(once, [] {
    const auto in_child = [] {
      if (in_use.load(std::memory_order_relaxed) > 0)
        detail::forked.store(true, std::memory_order_relaxed);
    };
    if (pthread_atfork(nullptr, nullptr, in_child) != 0)
      fail(LAPILLI_OUT_OF_MEMORY, "The machine is out of memory (pthread_atfork).");
  });
#endif
  ++in_use;
}

DriverInUse::~DriverInUse() {
  if (ends_)
    --in_use;
}

void refuse_in_child() {
  if (is_forked())
    fail(LAPILLI_DEVICE_LOST,
         "This process was forked from one that uses Vulkan, whose devices do not work here. Start it by "
         "\"spawn\" or \"forkserver\" instead of \"fork\", or use devices in the child only, after the "
         "fork.");
}

} // namespace lapilli
