// Device memory.
#pragma once

#include "device.h"
#include "planner.h"

namespace lapilli {

enum class MemoryUse {
  device,   // kernels read and write it; where the device shares the host's memory, the host may write it too
  bar,      // the device's own memory that the host can write
  upload,   // host memory that the device reads
  readback, // host memory that the device writes and the host reads: cached
};

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

// A part of a Vulkan buffer.
struct Region {
  VkBuffer buffer = VK_NULL_HANDLE;
  uint64_t offset = 0;
  uint64_t size = 0;
};

// A Vulkan buffer with memory of its own, mapped when the host can see it.
class GpuBuffer {
public:
  GpuBuffer() = default;
  // `what` goes into the message when there is not enough memory.
  GpuBuffer(Device& device, uint64_t size, MemoryUse use, MemoryCounter& counter, const char* what);
  ~GpuBuffer();
  GpuBuffer(GpuBuffer&& other) noexcept { *this = std::move(other); }
  GpuBuffer& operator=(GpuBuffer&& other) noexcept;

  VkBuffer handle() const { return buffer_; }
  uint64_t size() const { return size_; }
  std::byte* mapped() const { return mapped_; } // null when the host cannot see it
  // Whether the host sees at once what the device wrote, and reads it as quickly as its own memory.
  bool is_readable() const { return mapped_ != nullptr && coherent_ && cached_; }
  // Makes what the device wrote visible to the host; needed before reading mapped().
  void invalidate() const;

private:
  void release();

  Device* device_ = nullptr;
  MemoryCounter* counter_ = nullptr;
  VkBuffer buffer_ = VK_NULL_HANDLE;
  VkDeviceMemory memory_ = VK_NULL_HANDLE;
  uint64_t size_ = 0;
  uint64_t allocated_ = 0;
  std::byte* mapped_ = nullptr;
  bool coherent_ = true, cached_ = false;
};

// The buffers behind the blocks of a memory plan.
class Blocks {
public:
  // Afterwards there are blocks of at least these sizes. What was in them is lost when they have to grow.
  void ensure(Device& device, std::span<const uint64_t> sizes, MemoryUse use, MemoryCounter& counter, const char* what);

  Region region(const Place& place, uint64_t size) const { return {blocks_[place.block].handle(), place.offset, size}; }
  std::byte* mapped(const Place& place) const;
  void invalidate() const;
  uint64_t size() const;
  std::span<const GpuBuffer> all() const { return blocks_; }

private:
  std::vector<GpuBuffer> blocks_;
};

// Bytes by which bindings are widened, filled with NaN: 0 except in tests (LAPILLI_BINDING_SLACK). A kernel that reads out of
// bounds gets NaN there, where most drivers return zeros and hide it.
uint64_t binding_slack();

// Whether host-visible memory of the device itself exists, and is more than a small window.
bool has_large_bar(const Capabilities& device);

// Bytes of the largest block that a memory plan may have: a GpuBuffer takes a little more.
uint64_t largest_block(const Capabilities& device);

// Offsets of bindings are multiples of this.
uint64_t binding_alignment(const Capabilities& device);

} // namespace lapilli
