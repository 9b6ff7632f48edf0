// Device memory, and how much of it is taken.
#pragma once

#include "base/align.h"
#include "hal/device.h"

namespace lapilli {

using hal::MemoryUse;
using hal::Region;

// Bytes allocated by one program or stream, for lapilli_memory_info.
class MemoryCounter {
public:
  explicit MemoryCounter(uint64_t most = UINT64_MAX) : limit(most) {}
  uint64_t load() const { return bytes_; }
  // False, and nothing is added, where that would be more than the limit.
  bool add(uint64_t bytes) {
    if (const uint64_t before = bytes_.fetch_add(bytes); bytes <= limit && before <= limit - bytes)
      return true;
    bytes_ -= bytes;
    return false;
  }
  void subtract(uint64_t bytes) { bytes_ -= bytes; }

  uint64_t limit; // set before anything is added

private:
  std::atomic<uint64_t> bytes_{0};
};

// A buffer of a device whose bytes are counted.
class GpuBuffer {
public:
  GpuBuffer() = default;
  // `what` goes into the message when there is not enough memory.
  GpuBuffer(hal::Device& device, uint64_t size, MemoryUse use, MemoryCounter& counter, const char* what);
  // Memory that is not the program's own, whatever the limit.
  GpuBuffer(std::unique_ptr<hal::Buffer> buffer, MemoryCounter& counter);
  ~GpuBuffer();
  GpuBuffer(GpuBuffer&& other) noexcept { *this = std::move(other); }
  GpuBuffer& operator=(GpuBuffer&& other) noexcept {
    std::swap(buffer_, other.buffer_);
    std::swap(counter_, other.counter_);
    return *this;
  }

  Region region(uint64_t offset, uint64_t size) const { return {buffer_.get(), offset, size}; }
  uint64_t size() const { return buffer_ ? buffer_->size() : 0; }
  std::byte* mapped() const { return buffer_->mapped(); } // null when the host cannot see it
  bool is_readable() const { return buffer_->is_readable(); }
  void invalidate() const { buffer_->invalidate(); } // see hal::Buffer
  hal::SharedMemory share(hal::Handle kind) const { return buffer_->share(kind); }

private:
  std::unique_ptr<hal::Buffer> buffer_;
  MemoryCounter* counter_ = nullptr;
};

// Bytes of the largest block that a memory plan may have: a GpuBuffer takes a little more.
uint64_t largest_block(const hal::Capabilities& device);

// Offsets of bindings are multiples of this.
uint64_t binding_alignment(const hal::Capabilities& device);

} // namespace lapilli
