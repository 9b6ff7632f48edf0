#include "core/memory.h"

#include "base/error.h"

#include <algorithm>
#include <bit>

namespace lapilli {

namespace {

constexpr uint64_t most_padding = 512; // of a buffer on a software device

uint64_t padded(uint64_t size, const hal::Capabilities& device) {
  const uint64_t whole = std::max<uint64_t>(align_up(size, 256), 256);
  // lavapipe compiles a kernel again for texel views of a buffer whose size is a power of two. The first step of 256
  // bytes is for views that end in the padding (see resolve_binding).
  return !device.is_cpu() ? whole : whole + (std::has_single_bit(whole + 256) ? most_padding : 256);
}

} // namespace

GpuBuffer::GpuBuffer(hal::Device& device, uint64_t wanted, MemoryUse use, MemoryCounter& counter, const char* what) {
  const hal::Capabilities& capabilities = device.capabilities;
  const uint64_t bytes = padded(wanted, capabilities);
  const auto out_of_memory = [&](uint64_t limit) {
    fail(LAPILLI_OUT_OF_MEMORY, capabilities.name, " has not enough memory for ", human_size(bytes), " of ", what, " (",
         limit != 0 ? cat("the device allows ", human_size(limit))
                    : cat("its memory is ", human_size(capabilities.device_memory), ", ", human_size(counter.load()),
                          " of it are taken by this program"),
         "). Release other programs, run smaller inputs, or choose another device with LAPILLI_DEVICE.");
  };
  if (bytes > capabilities.max_allocation)
    out_of_memory(capabilities.max_allocation);
  if (!counter.add(bytes))
    fail(LAPILLI_OUT_OF_MEMORY, "The program needs ", human_size(bytes), " for ", what, " beside ",
         human_size(counter.load()), " that it has, and may take ", human_size(counter.limit),
         " in all (device_bytes of the limits, or all memory of ", capabilities.name,
         "). Run smaller inputs, or raise the limit.");
  try {
    uint64_t most = 0;
    buffer_ = device.create_buffer(bytes, use, most);
    if (!buffer_)
      out_of_memory(most);
  } catch (...) {
    counter.subtract(bytes);
    throw;
  }
  counter_ = &counter;
}

GpuBuffer::GpuBuffer(std::unique_ptr<hal::Buffer> buffer, MemoryCounter& counter)
    : buffer_(std::move(buffer)), counter_(&counter) {
  static_cast<void>(counter.add(buffer_->size()));
}

GpuBuffer::~GpuBuffer() {
  if (buffer_)
    counter_->subtract(buffer_->size());
}

uint64_t largest_block(const hal::Capabilities& device) {
  const uint64_t alignment = binding_alignment(device), padding = device.is_cpu() ? most_padding : 0;
  return device.max_allocation < padding ? 0 : (device.max_allocation - padding) / alignment * alignment;
}

uint64_t binding_alignment(const hal::Capabilities& device) {
  return std::max<uint64_t>({256, device.limits.storage_alignment, device.limits.texel_alignment});
}

} // namespace lapilli
