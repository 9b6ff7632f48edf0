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
constexpr size_t copied_piece = size_t{4} << 20; // takes longer than to start a thread

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

void copy_bytes(void* to, const void* from, size_t size) {
  const size_t pieces = std::max<size_t>(size / copied_piece, 1);
  const auto part = [&](size_t i) {
    const size_t begin = i * copied_piece, bytes = i + 1 == pieces ? size - begin : copied_piece;
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, bytes);
  };
  if (pieces == 1)
    part(0);
  else
    parallel(pieces, part);
}

} // namespace lapilli
