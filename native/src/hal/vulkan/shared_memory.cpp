// Memory that is shared with other devices, interfaces and processes, or that the application has already.

#include "base/error.h"
#include "hal/vulkan/buffer.h"

#include <algorithm>

#if !defined(_WIN32)
#include <unistd.h>
#endif

namespace lapilli::vulkan {

namespace {

struct Kind {
  const char* name;
  const char* extension;
  VkExternalMemoryHandleTypeFlagBits type;
};

Kind kind_of(hal::Handle kind) {
  switch (kind) {
  case hal::Handle::host_pointer:
    return {"memory of the host", VK_EXT_EXTERNAL_MEMORY_HOST_EXTENSION_NAME,
            VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT};
  case hal::Handle::opaque_fd:
    return {"opaque file descriptors", VK_KHR_EXTERNAL_MEMORY_FD_EXTENSION_NAME,
            VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT};
  case hal::Handle::dma_buf:
    return {"dma-bufs", VK_EXT_EXTERNAL_MEMORY_DMA_BUF_EXTENSION_NAME, VK_EXTERNAL_MEMORY_HANDLE_TYPE_DMA_BUF_BIT_EXT};
  case hal::Handle::hardware_buffer:
    return {"hardware buffers of Android", VK_ANDROID_EXTERNAL_MEMORY_ANDROID_HARDWARE_BUFFER_EXTENSION_NAME,
            VK_EXTERNAL_MEMORY_HANDLE_TYPE_ANDROID_HARDWARE_BUFFER_BIT_ANDROID};
  case hal::Handle::native_buffer:
    break;
  }
  return {"buffers of Vulkan", "", VkExternalMemoryHandleTypeFlagBits{}};
}

bool offered(const Extensions& extensions, hal::Handle kind) {
  switch (kind) {
  case hal::Handle::host_pointer:
    return extensions.external_host;
  case hal::Handle::opaque_fd:
    return extensions.external_fd;
  case hal::Handle::dma_buf:
    return extensions.external_dma_buf;
  case hal::Handle::hardware_buffer:
    return extensions.external_hardware_buffer;
  case hal::Handle::native_buffer:
    break;
  }
  return true;
}

void need(const Device& device, hal::Handle kind) {
  if (!offered(device.physical.extensions, kind))
    fail(LAPILLI_UNSUPPORTED, device.capabilities.name, " does not share ", kind_of(kind).name, ": its driver has no ",
         kind_of(kind).extension, ". Copy through the host instead.");
}

template <class T> T made(VkStructureType type) {
  T info{};
  info.sType = type;
  return info;
}

constexpr int no_file = -1;

// Of its own, for the driver takes what it imports.
int duplicate(intptr_t descriptor) {
#if defined(_WIN32)
  (void)descriptor;
  fail(LAPILLI_UNSUPPORTED, "There are no file descriptors of memory on Windows.");
#else
  const int copy = descriptor < 0 || descriptor > INT32_MAX ? -1 : ::dup(static_cast<int>(descriptor));
  if (copy < 0)
    fail(LAPILLI_INVALID_ARGUMENT, "The file descriptor ", descriptor, " is not open.");
  return copy;
#endif
}

void close_file(int descriptor) {
#if !defined(_WIN32)
  ::close(descriptor);
#else
  (void)descriptor;
#endif
}

} // namespace

std::unique_ptr<Buffer> Buffer::create_shared(const Device& device, uint64_t bytes, hal::Handle kind) {
  if (kind != hal::Handle::opaque_fd && kind != hal::Handle::dma_buf)
    fail(LAPILLI_INVALID_ARGUMENT, "Memory is made for opaque file descriptors and dma-bufs; ", kind_of(kind).name,
         " are imported, or exported from any buffer.");
  need(device, kind);
  auto of_buffer = made<VkExternalMemoryBufferCreateInfo>(VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO);
  of_buffer.handleTypes = static_cast<VkExternalMemoryHandleTypeFlags>(kind_of(kind).type);
  auto of_memory = made<VkExportMemoryAllocateInfo>(VK_STRUCTURE_TYPE_EXPORT_MEMORY_ALLOCATE_INFO);
  of_memory.handleTypes = static_cast<VkExternalMemoryHandleTypeFlags>(kind_of(kind).type);
  std::unique_ptr<Buffer> buffer(new Buffer(device, bytes));
  buffer->shared_ = kind;
  uint64_t most = 0;
  return buffer->allocate(hal::MemoryUse::device, most, {&of_buffer, &of_memory}) ? std::move(buffer) : nullptr;
}

std::unique_ptr<Buffer> Buffer::import(const Device& device, const hal::SharedMemory& memory, uint64_t bytes) {
  const DeviceFunctions& vk = device.vk;
  need(device, memory.kind);
  if (memory.offset != 0)
    fail(LAPILLI_INVALID_ARGUMENT, "Memory is imported from its beginning; an offset of ", memory.offset,
         " was given. Tensors may begin anywhere in the buffer.");
  std::unique_ptr<Buffer> buffer(new Buffer(device, bytes));
  buffer->shared_ = memory.kind;
  if (memory.kind == hal::Handle::native_buffer) {
    buffer->handle_ = reinterpret_cast<VkBuffer>(memory.handle);
    buffer->borrowed_ = true;
    buffer->memory_bytes_ = bytes;
    return buffer;
  }
  auto of_buffer = made<VkExternalMemoryBufferCreateInfo>(VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO);
  of_buffer.handleTypes = static_cast<VkExternalMemoryHandleTypeFlags>(kind_of(memory.kind).type);
  auto pointer = made<VkImportMemoryHostPointerInfoEXT>(VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT);
  auto file = made<VkImportMemoryFdInfoKHR>(VK_STRUCTURE_TYPE_IMPORT_MEMORY_FD_INFO_KHR);
  auto android =
      made<VkImportAndroidHardwareBufferInfoANDROID>(VK_STRUCTURE_TYPE_IMPORT_ANDROID_HARDWARE_BUFFER_INFO_ANDROID);
  Sharing sharing{&of_buffer, nullptr, UINT32_MAX, memory.memory_bytes};
  hal::MemoryUse use = hal::MemoryUse::device;
  file.fd = no_file;
  if (memory.kind == hal::Handle::host_pointer) {
    const uint64_t alignment = device.capabilities.host_alignment;
    if (alignment == 0 || static_cast<uint64_t>(memory.handle) % alignment != 0 || bytes % alignment != 0)
      fail(LAPILLI_INVALID_ARGUMENT, device.capabilities.name,
           " uses memory of the host whose address and size are "
           "multiples of ",
           alignment, "; ", bytes, " bytes were given. Allocate it by aligned_alloc or mmap.");
    auto properties = made<VkMemoryHostPointerPropertiesEXT>(VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT);
    pointer.handleType = kind_of(memory.kind).type;
    pointer.pHostPointer = reinterpret_cast<void*>(memory.handle);
    if (vk.GetMemoryHostPointerPropertiesEXT(device.handle, pointer.handleType, pointer.pHostPointer, &properties) !=
            VK_SUCCESS ||
        properties.memoryTypeBits == 0)
      fail(LAPILLI_INVALID_ARGUMENT, device.capabilities.name,
           " cannot use this memory of the host. It must be memory of the process as malloc or mmap give it.");
    sharing.types = properties.memoryTypeBits;
    sharing.memory = &pointer;
    sharing.bytes = bytes;
    use = hal::MemoryUse::readback; // the host's, cached
  } else if (memory.kind == hal::Handle::hardware_buffer) {
    auto properties =
        made<VkAndroidHardwareBufferPropertiesANDROID>(VK_STRUCTURE_TYPE_ANDROID_HARDWARE_BUFFER_PROPERTIES_ANDROID);
    android.buffer = reinterpret_cast<AHardwareBuffer*>(memory.handle);
    check(vk.GetAndroidHardwareBufferPropertiesANDROID(device.handle, android.buffer, &properties),
          "vkGetAndroidHardwareBufferPropertiesANDROID");
    sharing.types = properties.memoryTypeBits;
    sharing.memory = &android;
    sharing.bytes = properties.allocationSize;
  } else {
    file.handleType = kind_of(memory.kind).type;
    file.fd = duplicate(memory.handle);
    sharing.memory = &file;
    if (memory.kind == hal::Handle::dma_buf) {
      auto properties = made<VkMemoryFdPropertiesKHR>(VK_STRUCTURE_TYPE_MEMORY_FD_PROPERTIES_KHR);
      if (vk.GetMemoryFdPropertiesKHR(device.handle, file.handleType, file.fd, &properties) == VK_SUCCESS)
        sharing.types = properties.memoryTypeBits;
    }
  }
  try {
    uint64_t most = 0;
    if (!buffer->allocate(use, most, sharing))
      fail(LAPILLI_OUT_OF_MEMORY, device.capabilities.name, " cannot import ", human_size(bytes), " of memory.");
  } catch (...) {
    if (file.fd != no_file && buffer->memory_ == VK_NULL_HANDLE) // once it is imported it is the driver's
      close_file(file.fd);
    throw;
  }
  if (memory.kind == hal::Handle::host_pointer)
    buffer->mapped_ = reinterpret_cast<std::byte*>(memory.handle);
  return buffer;
}

hal::SharedMemory Buffer::share(hal::Handle kind) const {
  if (kind == hal::Handle::native_buffer)
    return {kind, reinterpret_cast<intptr_t>(handle_), memory_bytes_, 0};
  if (kind != shared_ || (kind != hal::Handle::opaque_fd && kind != hal::Handle::dma_buf))
    fail(LAPILLI_UNSUPPORTED, "The buffer was not made to be shared as ", kind_of(kind).name,
         ". Make it by lapilli_buffer_create_shared.");
  auto info = made<VkMemoryGetFdInfoKHR>(VK_STRUCTURE_TYPE_MEMORY_GET_FD_INFO_KHR);
  info.memory = memory_;
  info.handleType = kind_of(kind).type;
  int file = -1;
  check(device_.vk.GetMemoryFdKHR(device_.handle, &info, &file), "vkGetMemoryFdKHR");
  return {kind, file, memory_bytes_, 0};
}

} // namespace lapilli::vulkan
