#include "core/staging.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr uint64_t nowhere = UINT64_MAX;

} // namespace

Staging::Staging(hal::Device& device, uint64_t size, uint64_t alignment, MemoryCounter& counter)
    : device_(device), counter_(counter), alignment_(alignment), size_(align_up(size, alignment)) {}

// Where a piece would begin, or nowhere.
uint64_t Staging::place(const Batches& batches, uint64_t bytes) {
  while (!taken_.empty() && batches.has_finished(taken_.front().batch)) {
    begin_ = taken_.front().end;
    taken_.pop_front();
  }
  if (taken_.empty())
    begin_ = end_ = 0;
  const uint64_t left = size_ - end_ % size_;
  const uint64_t begin = bytes <= left ? end_ : end_ + left; // not across the end of the ring
  return bytes <= size_ && begin + bytes - begin_ <= size_ ? begin : nowhere;
}

bool Staging::fits(const Batches& batches, uint64_t bytes) { return place(batches, bytes) != nowhere; }

Region Staging::take(Batches& batches, uint64_t bytes) {
  if (buffer_.size() == 0)
    buffer_ = GpuBuffer(device_, size_, device_.capabilities.large_bar ? MemoryUse::bar : MemoryUse::upload, counter_,
                        "staging memory");
  for (;;) {
    const uint64_t batch = batches.record().id(), begin = place(batches, bytes);
    if (begin == nowhere) {
      batches.wait_for_oldest();
      continue;
    }
    if (taken_.empty() || taken_.back().batch != batch)
      taken_.push_back({batch, 0});
    end_ = taken_.back().end = align_up(begin + bytes, alignment_);
    return buffer_.region(begin % size_, bytes);
  }
}

} // namespace lapilli
