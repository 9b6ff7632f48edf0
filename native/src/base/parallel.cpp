#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace lapilli {

namespace {

constexpr size_t most_threads = 8;

} // namespace

void parallel(size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::vector<std::exception_ptr> errors(count);
  const auto run = [&] {
    for (size_t i = next++; i < count; i = next++)
      try {
        work(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
  };
  std::vector<std::thread> threads;
  const size_t wanted = std::min<size_t>({count, std::max(1u, std::thread::hardware_concurrency()), most_threads});
  threads.reserve(wanted);
  try {
    while (threads.size() + 1 < wanted)
      threads.emplace_back(run);
  } catch (const std::exception&) { // the system gives no more threads, or no memory for them
  }
  run();
  for (std::thread& thread : threads)
    thread.join();
  for (const std::exception_ptr& error : errors)
    if (error)
      std::rethrow_exception(error);
}

} // namespace lapilli
