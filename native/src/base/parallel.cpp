#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace lapilli {

namespace {

constexpr size_t most_threads = 8;
constexpr size_t piece = size_t{1} << 20; // of bytes: takes longer than to start a thread

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

void in_pieces(size_t count, size_t size, const std::function<void(size_t, size_t)>& work) {
  const size_t items = piece / size, pieces = std::max<size_t>(count / items, 1);
  if (pieces == 1)
    return work(0, count);
  parallel(pieces, [&](size_t i) { work(i * items, i + 1 == pieces ? count - i * items : items); });
}

void copy_bytes(void* to, const void* from, size_t size) {
  in_pieces(size, 1, [&](size_t first, size_t bytes) {
    std::memcpy(static_cast<std::byte*>(to) + first, static_cast<const std::byte*>(from) + first, bytes);
  });
}

} // namespace lapilli
