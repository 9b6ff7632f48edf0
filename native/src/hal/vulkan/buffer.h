// A Vulkan buffer with memory of its own.
#pragma once

#include "hal/vulkan/device.h"

namespace lapilli::vulkan {

class Buffer final : public hal::Buffer {
public:
  // As hal::Device::create_buffer.
  static std::unique_ptr<Buffer> create(const Device& device, uint64_t bytes, hal::MemoryUse use, uint64_t& most);
  // As hal::Device::create_shared and import.
  static std::unique_ptr<Buffer> create_shared(const Device& device, uint64_t bytes, hal::Handle kind);
  static std::unique_ptr<Buffer> import(const Device& device, const hal::SharedMemory& memory, uint64_t bytes);
  ~Buffer() override;

  VkBuffer handle() const { return handle_; }
  void invalidate() const override;
  hal::SharedMemory share(hal::Handle kind) const override;

private:
  Buffer(const Device& device, uint64_t bytes) : hal::Buffer(bytes), device_(device) {}
  // What follows in the chains of structures is of memory that is shared; `types`: those that it may have. False: not enough memory.
  struct Sharing {
    const void* buffer = nullptr;
    const void* memory = nullptr;
    uint32_t types = UINT32_MAX;
    uint64_t bytes = 0; // of the memory; 0: as many as the buffer needs
  };
  bool allocate(hal::MemoryUse use, uint64_t& most, const Sharing& sharing);

  const Device& device_;
  VkBuffer handle_ = VK_NULL_HANDLE;
  VkDeviceMemory memory_ = VK_NULL_HANDLE;
  uint64_t memory_bytes_ = 0;
  bool borrowed_ = false;                           // the buffer is somebody else's
  hal::Handle shared_ = hal::Handle::native_buffer; // what its memory was made for
};

inline VkBuffer handle_of(const hal::Region& region) { return static_cast<const Buffer*>(region.buffer)->handle(); }

} // namespace lapilli::vulkan
