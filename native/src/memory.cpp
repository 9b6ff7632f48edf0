#include "memory.h"

#include "error.h"

#include <algorithm>
#include <bit>

namespace lapilli {

namespace {

constexpr VkMemoryPropertyFlags local = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
constexpr VkMemoryPropertyFlags visible = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT;
constexpr VkMemoryPropertyFlags coherent = VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
constexpr VkMemoryPropertyFlags cached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;

constexpr uint64_t most_padding = 512; // of a buffer on a software device

struct Wish {
  VkMemoryPropertyFlags with, without;
};

std::vector<Wish> wishes(MemoryUse use, const Capabilities& device) {
  switch (use) {
  case MemoryUse::device:
    if (!device.is_discrete())
      return {{local | visible | coherent, 0}, {local, 0}};
    return {{local, visible}, {local, 0}};
  case MemoryUse::bar:
    return {{local | visible | coherent, 0}, {visible | coherent, 0}};
  case MemoryUse::upload:
    return {{visible | coherent, local | cached}, {visible | coherent, local}, {visible | coherent, 0}};
  case MemoryUse::readback:
    return {{visible | coherent | cached, 0}, {visible | cached, 0}, {visible | coherent, 0}};
  }
  return {};
}

// The index of the first memory type that fits the earliest wish.
uint32_t memory_type(const Capabilities& device, uint32_t allowed, MemoryUse use) {
  constexpr VkMemoryPropertyFlags unusual = VK_MEMORY_PROPERTY_PROTECTED_BIT | VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT |
                                            VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD;
  for (const Wish& wish : wishes(use, device))
    for (uint32_t i = 0; i < device.memory.memoryTypeCount; ++i) {
      const VkMemoryPropertyFlags flags = device.memory.memoryTypes[i].propertyFlags;
      if ((allowed >> i & 1) != 0 && (flags & wish.with) == wish.with && (flags & (wish.without | unusual)) == 0)
        return i;
    }
  fail(LAPILLI_INTERNAL, "The driver of ", device.name, " offers no memory that Lapilli can use.");
}

} // namespace

GpuBuffer::GpuBuffer(Device& device, uint64_t size, MemoryUse use, MemoryCounter& counter, const char* what)
    : device_(&device), counter_(&counter), size_(std::max<uint64_t>(align_up(size, 256), 256)) {
  const Capabilities& capabilities = device.capabilities;
  // lavapipe compiles a kernel again for texel views of a buffer whose size is a power of two. The first step of 256
  // bytes is for views that end in the padding (see resolve_binding).
  if (capabilities.is_cpu())
    size_ += std::has_single_bit(size_ + 256) ? most_padding : 256;
  const auto out_of_memory = [&](uint64_t limit) {
    fail(LAPILLI_OUT_OF_MEMORY, capabilities.name, " has not enough memory for ", human_size(size_), " of ", what, " (",
         limit != 0 ? cat("the device allows ", human_size(limit))
                    : cat("its memory is ", human_size(capabilities.device_memory()), ", ", human_size(counter.load()),
                          " of it are taken by this program"),
         "). Release other programs, run smaller inputs, or choose another device with LAPILLI_DEVICE.");
  };
  if (size_ > capabilities.max_allocation)
    out_of_memory(capabilities.max_allocation);
  if (!counter.add(size_))
    fail(LAPILLI_OUT_OF_MEMORY, "The program needs ", human_size(size_), " for ", what, " beside ",
         human_size(counter.load()), " that it has, and may take ", human_size(counter.limit),
         " in all (device_bytes of the limits, or all memory of ", capabilities.name,
         "). Run smaller inputs, or raise the limit.");
  allocated_ = size_;
  try {
    VkBufferCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    info.size = size_;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_UNIFORM_TEXEL_BUFFER_BIT |
                 VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
    info.sharingMode = VK_SHARING_MODE_EXCLUSIVE;
    check(device.vk.CreateBuffer(device.handle, &info, nullptr, &buffer_), "vkCreateBuffer");
    VkMemoryRequirements needed{};
    device.vk.GetBufferMemoryRequirements(device.handle, buffer_, &needed);
    const uint32_t type = memory_type(capabilities, needed.memoryTypeBits, use);
    const VkMemoryType& properties = capabilities.memory.memoryTypes[type];
    if (const uint64_t heap = capabilities.memory.memoryHeaps[properties.heapIndex].size; needed.size > heap)
      out_of_memory(heap);
    VkMemoryAllocateInfo allocate{};
    allocate.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    allocate.allocationSize = needed.size;
    allocate.memoryTypeIndex = type;
    const VkResult result = device.vk.AllocateMemory(device.handle, &allocate, nullptr, &memory_);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY ||
        result == VK_ERROR_TOO_MANY_OBJECTS)
      out_of_memory(0);
    check(result, "vkAllocateMemory");
    check(device.vk.BindBufferMemory(device.handle, buffer_, memory_, 0), "vkBindBufferMemory");
    coherent_ = (properties.propertyFlags & coherent) != 0;
    cached_ = (properties.propertyFlags & cached) != 0;
    if ((properties.propertyFlags & visible) != 0 && (use != MemoryUse::device || coherent_)) {
      void* mapped = nullptr;
      check(device.vk.MapMemory(device.handle, memory_, 0, VK_WHOLE_SIZE, 0, &mapped), "vkMapMemory");
      mapped_ = static_cast<std::byte*>(mapped);
    }
  } catch (...) {
    release();
    throw;
  }
}

GpuBuffer::~GpuBuffer() { release(); }

GpuBuffer& GpuBuffer::operator=(GpuBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(counter_, other.counter_);
  std::swap(buffer_, other.buffer_);
  std::swap(memory_, other.memory_);
  std::swap(size_, other.size_);
  std::swap(allocated_, other.allocated_);
  std::swap(mapped_, other.mapped_);
  std::swap(coherent_, other.coherent_);
  std::swap(cached_, other.cached_);
  return *this;
}

void GpuBuffer::release() {
  if (device_ == nullptr)
    return;
  device_->vk.DestroyBuffer(device_->handle, buffer_, nullptr);
  device_->vk.FreeMemory(device_->handle, memory_, nullptr);
  counter_->subtract(allocated_);
  device_ = nullptr;
}

void GpuBuffer::invalidate() const {
  if (coherent_ || mapped_ == nullptr)
    return;
  VkMappedMemoryRange range{};
  range.sType = VK_STRUCTURE_TYPE_MAPPED_MEMORY_RANGE;
  range.memory = memory_;
  range.size = VK_WHOLE_SIZE;
  check(device_->vk.InvalidateMappedMemoryRanges(device_->handle, 1, &range), "vkInvalidateMappedMemoryRanges");
}

void Blocks::ensure(Device& device, std::span<const uint64_t> sizes, MemoryUse use, MemoryCounter& counter,
                    const char* what) {
  bool enough = blocks_.size() >= sizes.size();
  for (size_t i = 0; enough && i < sizes.size(); ++i)
    enough = blocks_[i].size() >= sizes[i];
  if (enough)
    return;
  blocks_.clear(); // first, so that old and new blocks are never there together
  for (const uint64_t size : sizes)
    blocks_.emplace_back(device, size + binding_slack(), use, counter, what);
}

uint64_t binding_slack() {
  static const uint64_t slack = [] {
    const auto given = environment("LAPILLI_BINDING_SLACK");
    return given ? std::strtoull(given->c_str(), nullptr, 10) / 16 * 16 : 0;
  }();
  return slack;
}

std::byte* Blocks::mapped(const Place& place) const {
  std::byte* base = blocks_[place.block].mapped();
  return base == nullptr ? nullptr : base + place.offset;
}

void Blocks::invalidate() const {
  for (const GpuBuffer& block : blocks_)
    block.invalidate();
}

uint64_t Blocks::size() const {
  uint64_t total = 0;
  for (const GpuBuffer& block : blocks_)
    total += block.size();
  return total;
}

bool has_large_bar(const Capabilities& device) {
  constexpr uint64_t small_window = uint64_t{256} << 20;
  constexpr VkMemoryPropertyFlags wanted = local | visible | coherent;
  for (uint32_t i = 0; i < device.memory.memoryTypeCount; ++i) {
    const VkMemoryType& type = device.memory.memoryTypes[i];
    if ((type.propertyFlags & wanted) == wanted && device.memory.memoryHeaps[type.heapIndex].size > small_window)
      return true;
  }
  return false;
}

uint64_t largest_block(const Capabilities& device) {
  const uint64_t alignment = binding_alignment(device), padding = device.is_cpu() ? most_padding : 0;
  return device.max_allocation < padding ? 0 : (device.max_allocation - padding) / alignment * alignment;
}

uint64_t binding_alignment(const Capabilities& device) {
  return std::max<uint64_t>(
      {256, device.limits.minStorageBufferOffsetAlignment, device.limits.minTexelBufferOffsetAlignment});
}

} // namespace lapilli
