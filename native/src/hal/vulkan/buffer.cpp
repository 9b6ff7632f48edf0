#include "hal/vulkan/buffer.h"

#include "base/error.h"

namespace lapilli::vulkan {

namespace {

constexpr VkMemoryPropertyFlags local = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
constexpr VkMemoryPropertyFlags visible = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT;
constexpr VkMemoryPropertyFlags coherent = VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
constexpr VkMemoryPropertyFlags cached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;

struct Wish {
  VkMemoryPropertyFlags with, without;
};

std::vector<Wish> wishes(hal::MemoryUse use, const hal::Capabilities& device) {
  switch (use) {
  case hal::MemoryUse::device:
    if (!device.is_discrete())
      return {{local | visible | coherent, 0}, {local, 0}};
    return {{local, visible}, {local, 0}};
  case hal::MemoryUse::bar:
    return {{local | visible | coherent, 0}, {visible | coherent, 0}};
  case hal::MemoryUse::upload:
    return {{visible | coherent, local | cached}, {visible | coherent, local}, {visible | coherent, 0}};
  case hal::MemoryUse::readback:
    return {{visible | coherent | cached, 0}, {visible | cached, 0}, {visible | coherent, 0}};
  }
  return {};
}

// The index of the first memory type that fits the earliest wish.
uint32_t memory_type(const PhysicalDevice& device, uint32_t allowed, hal::MemoryUse use) {
  constexpr VkMemoryPropertyFlags unusual = VK_MEMORY_PROPERTY_PROTECTED_BIT | VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT |
                                            VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD;
  for (const Wish& wish : wishes(use, device.capabilities))
    for (uint32_t i = 0; i < device.memory.memoryTypeCount; ++i) {
      const VkMemoryPropertyFlags flags = device.memory.memoryTypes[i].propertyFlags;
      if ((allowed >> i & 1) != 0 && (flags & wish.with) == wish.with && (flags & (wish.without | unusual)) == 0)
        return i;
    }
  fail(LAPILLI_INTERNAL, "The driver of ", device.capabilities.name, " offers no memory that Lapilli can use.");
}

} // namespace

std::unique_ptr<Buffer> Buffer::create(const Device& device, uint64_t bytes, hal::MemoryUse use, uint64_t& most) {
  std::unique_ptr<Buffer> buffer(new Buffer(device, bytes));
  most = 0;
  return buffer->allocate(use, most, {}) ? std::move(buffer) : nullptr;
}

bool Buffer::allocate(hal::MemoryUse use, uint64_t& most, const Sharing& sharing) {
  const DeviceFunctions& vk = device_.vk;
  VkBufferCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
  info.pNext = sharing.buffer;
  info.size = size_;
  info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_UNIFORM_TEXEL_BUFFER_BIT |
               VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  info.sharingMode = VK_SHARING_MODE_EXCLUSIVE;
  check(vk.CreateBuffer(device_.handle, &info, nullptr, &handle_), "vkCreateBuffer");
  VkMemoryRequirements needed{};
  vk.GetBufferMemoryRequirements(device_.handle, handle_, &needed);
  const VkPhysicalDeviceMemoryProperties& memory = device_.physical.memory;
  const uint32_t type = memory_type(device_.physical, needed.memoryTypeBits & sharing.types, use);
  memory_bytes_ = sharing.bytes != 0 ? sharing.bytes : needed.size;
  if (memory_bytes_ < needed.size)
    fail(LAPILLI_INVALID_ARGUMENT, "A buffer of ", size_, " bytes needs ", needed.size, " bytes of memory on ",
         device_.capabilities.name, ", and the memory has ", memory_bytes_, ".");
  const VkMemoryType& properties = memory.memoryTypes[type];
  if (const uint64_t heap = memory.memoryHeaps[properties.heapIndex].size; needed.size > heap) {
    most = heap;
    return false;
  }
  VkMemoryAllocateInfo allocate{};
  allocate.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
  allocate.pNext = sharing.memory;
  allocate.allocationSize = memory_bytes_;
  allocate.memoryTypeIndex = type;
  const VkResult result = vk.AllocateMemory(device_.handle, &allocate, nullptr, &memory_);
  if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY ||
      result == VK_ERROR_TOO_MANY_OBJECTS)
    return false;
  if (result == VK_ERROR_INVALID_EXTERNAL_HANDLE)
    fail(LAPILLI_INVALID_ARGUMENT, device_.capabilities.name,
         " cannot use this memory (vkAllocateMemory). It must be of "
         "the same device and driver, and a handle that was not closed.");
  check(result, "vkAllocateMemory");
  check(vk.BindBufferMemory(device_.handle, handle_, memory_, 0), "vkBindBufferMemory");
  coherent_ = (properties.propertyFlags & coherent) != 0;
  cached_ = (properties.propertyFlags & cached) != 0;
  if ((properties.propertyFlags & visible) != 0 && (use != hal::MemoryUse::device || coherent_)) {
    void* mapped = nullptr;
    check(vk.MapMemory(device_.handle, memory_, 0, VK_WHOLE_SIZE, 0, &mapped), "vkMapMemory");
    mapped_ = static_cast<std::byte*>(mapped);
  }
  return true;
}

Buffer::~Buffer() {
  if (borrowed_)
    return;
  device_.vk.DestroyBuffer(device_.handle, handle_, nullptr);
  device_.vk.FreeMemory(device_.handle, memory_, nullptr);
}

void Buffer::invalidate() const {
  if (coherent_ || mapped_ == nullptr)
    return;
  VkMappedMemoryRange range{};
  range.sType = VK_STRUCTURE_TYPE_MAPPED_MEMORY_RANGE;
  range.memory = memory_;
  range.size = VK_WHOLE_SIZE;
  check(device_.vk.InvalidateMappedMemoryRanges(device_.handle, 1, &range), "vkInvalidateMappedMemoryRanges");
}

} // namespace lapilli::vulkan
