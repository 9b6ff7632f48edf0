// Memory of a device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lapilli::hal {

enum class MemoryUse {
  device,   // kernels read and write it; where the device shares the host's memory, the host may write it too
  bar,      // the device's own memory that the host can write
  upload,   // host memory that the device reads
  readback, // host memory that the device writes and the host reads: cached
};

// How memory is named to somebody else, or by him.
enum class Handle { host_pointer, opaque_fd, dma_buf, hardware_buffer, native_buffer };

// Memory that is shared.
struct SharedMemory {
  Handle kind;
  intptr_t handle;       // the address, file descriptor or object
  uint64_t memory_bytes; // of all of it
  uint64_t offset;       // of the buffer in it
};

// Memory that kernels and copies use, mapped when the host can see it.
class Buffer {
public:
  virtual ~Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint64_t size() const { return size_; }
  std::byte* mapped() const { return mapped_; } // null when the host cannot see it
  // Whether the host sees at once what the device wrote, and reads it as quickly as its own memory.
  bool is_readable() const { return mapped_ != nullptr && coherent_ && cached_; }
  // Makes what the device wrote visible to the host; needed before reading mapped().
  virtual void invalidate() const = 0;
  // Names the memory to others. A file descriptor is the caller's to close. Throws UNSUPPORTED where the buffer has no such name.
  virtual SharedMemory share(Handle kind) const = 0;

protected:
  explicit Buffer(uint64_t size) : size_(size) {}

  const uint64_t size_;
  std::byte* mapped_ = nullptr;
  bool coherent_ = true, cached_ = false;
};

// A part of a buffer.
struct Region {
  const Buffer* buffer = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;
};

inline std::byte* mapped(const Region& region) { // null when the host cannot see it
  std::byte* const base = region.buffer->mapped();
  return base == nullptr ? nullptr : base + region.offset;
}

inline bool overlap(const Region& a, const Region& b) {
  return a.buffer == b.buffer && a.offset < b.offset + b.size && b.offset < a.offset + a.size;
}

} // namespace lapilli::hal
