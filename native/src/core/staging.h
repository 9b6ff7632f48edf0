// How bytes of the host reach memory that it does not see: by a ring of memory that it does.
#pragma once

#include "core/batches.h"

#include <deque>

namespace lapilli {

// A piece of the ring is handed out again when the device has finished the batch that was recorded when it was taken. The
// memory is allocated when it is first needed.
class Staging {
public:
  // Pieces begin at multiples of `alignment`.
  Staging(hal::Device& device, uint64_t size, uint64_t alignment, MemoryCounter& counter);

  // So many bytes for the batch that is recorded, at most size(). Where the ring is full, batches are waited for.
  Region take(Batches& batches, uint64_t bytes);
  // Whether take() does so at once: for one piece, or for several whose sizes are multiples of the alignment.
  bool fits(const Batches& batches, uint64_t bytes);
  uint64_t size() const { return size_; }
  uint64_t piece() const { return size_ / 4; } // the device copies one while the host writes the next

  // Copies what `write(bytes, offset)` writes, which is called piece after piece.
  template <class F> void upload(Batches& batches, const Region& to, F&& write) {
    const uint64_t most = piece();
    for (uint64_t done = 0; done < to.size; done += most) {
      const uint64_t size = std::min(most, to.size - done);
      const Region piece = take(batches, size);
      write(std::span(mapped(piece), static_cast<size_t>(size)), done);
      batches.record().copy(piece, {to.buffer, to.offset + done, size});
      batches.submit_if_due();
    }
  }

private:
  uint64_t place(const Batches& batches, uint64_t bytes);

  hal::Device& device_;
  MemoryCounter& counter_;
  const uint64_t alignment_, size_;
  GpuBuffer buffer_;
  struct Taken {
    uint64_t batch, end;
  };
  std::deque<Taken> taken_;      // in the ring now, the oldest first
  uint64_t begin_ = 0, end_ = 0; // of these, in bytes that ever went in
};

} // namespace lapilli
