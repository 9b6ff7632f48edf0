#include "hal/vulkan/commands.h"

#include "hal/vulkan/buffer.h"

namespace lapilli::vulkan {

namespace {

constexpr uint32_t sets_of_a_pool = 256;
constexpr uint32_t storage_buffers = 4 * sets_of_a_pool;
constexpr uint32_t texel_buffers = 2 * sets_of_a_pool;

struct StageMasks {
  VkPipelineStageFlags stages = 0;
  VkAccessFlags access = 0;
};

// By the bits of hal::Stage.
constexpr std::array<StageMasks, 128> stage_masks = [] {
  constexpr std::array<StageMasks, 7> bits{{
      {VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_WRITE_BIT},
      {VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_READ_BIT},
      {VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_READ_BIT},
      {VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_WRITE_BIT},
      {VK_PIPELINE_STAGE_TRANSFER_BIT, VK_ACCESS_TRANSFER_READ_BIT},
      {VK_PIPELINE_STAGE_TRANSFER_BIT, VK_ACCESS_TRANSFER_WRITE_BIT},
      {VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, 0},
  }};
  std::array<StageMasks, 128> result{};
  for (size_t i = 0; i < result.size(); ++i)
    for (size_t bit = 0; bit < bits.size(); ++bit)
      if ((i >> bit & 1) != 0) {
        result[i].stages |= bits[bit].stages;
        result[i].access |= bits[bit].access;
      }
  return result;
}();

VkWriteDescriptorSet descriptor_write(size_t binding, BindingType type) {
  VkWriteDescriptorSet write{};
  write.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
  write.dstBinding = static_cast<uint32_t>(binding);
  write.descriptorCount = 1;
  write.descriptorType = descriptor_type(type);
  return write;
}

} // namespace

Commands::Commands(Device& device, Queue& queue) : device_(device), queue_(queue) {
  try {
    create();
  } catch (...) {
    destroy();
    throw;
  }
}

void Commands::create() {
  const DeviceFunctions& vk = device_.vk;
  VkCommandPoolCreateInfo pool_info{};
  pool_info.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
  pool_info.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
  pool_info.queueFamilyIndex = device_.physical.queue_family;
  check(vk.CreateCommandPool(device_.handle, &pool_info, nullptr, &pool_), "vkCreateCommandPool");
  VkFenceCreateInfo fence_info{};
  fence_info.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO;
  check(vk.CreateFence(device_.handle, &fence_info, nullptr, &fence_), "vkCreateFence");
  VkCommandBufferAllocateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
  info.commandPool = pool_;
  info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  info.commandBufferCount = 1;
  check(vk.AllocateCommandBuffers(device_.handle, &info, &commands_), "vkAllocateCommandBuffers");
}

Commands::~Commands() { destroy(); }

void Commands::destroy() noexcept {
  const DeviceFunctions& vk = device_.vk;
  for (const VkBufferView view : views_)
    vk.DestroyBufferView(device_.handle, view, nullptr);
  for (const VkDescriptorPool pool : sets_)
    vk.DestroyDescriptorPool(device_.handle, pool, nullptr);
  vk.DestroyFence(device_.handle, fence_, nullptr);
  vk.DestroyCommandPool(device_.handle, pool_, nullptr);
}

void Commands::begin() {
  release();
  bound_ = VK_NULL_HANDLE;
  VkCommandBufferBeginInfo info{};
  info.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
  check(device_.vk.BeginCommandBuffer(commands_, &info), "vkBeginCommandBuffer");
}

void Commands::end() { check(device_.vk.EndCommandBuffer(commands_), "vkEndCommandBuffer"); }

void Commands::submit() {
  check(device_.vk.ResetFences(device_.handle, 1, &fence_), "vkResetFences");
  device_.submit(queue_, commands_, fence_);
}

void Commands::release() noexcept {
  for (size_t i = 0; i < sets_.size() && i <= current_; ++i)
    device_.vk.ResetDescriptorPool(device_.handle, sets_[i], 0);
  current_ = 0;
  for (const VkBufferView view : views_)
    device_.vk.DestroyBufferView(device_.handle, view, nullptr);
  views_.clear();
}

void Commands::barrier(hal::Stage from, hal::Stage to) {
  const StageMasks& before = stage_masks[static_cast<uint32_t>(from)];
  const StageMasks& after = stage_masks[static_cast<uint32_t>(to)];
  VkMemoryBarrier info{};
  info.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER;
  info.srcAccessMask = before.access;
  info.dstAccessMask = after.access;
  if (device_.capabilities.full_barriers) {
    info.srcAccessMask |= VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
    info.dstAccessMask |= VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
  }
  device_.vk.CmdPipelineBarrier(commands_, before.stages, after.stages, 0, 1, &info, 0, nullptr, 0, nullptr);
}

void Commands::copy(const hal::Region& from, const hal::Region& to) {
  const VkBufferCopy part{from.offset, to.offset, to.size};
  device_.vk.CmdCopyBuffer(commands_, handle_of(from), handle_of(to), 1, &part);
}

void Commands::fill(const hal::Region& to, uint32_t word) {
  device_.vk.CmdFillBuffer(commands_, handle_of(to), to.offset, to.size, word);
}

VkDescriptorPool Commands::create_pool() {
  const std::array<VkDescriptorPoolSize, 2> sizes{
      {{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, storage_buffers}, {VK_DESCRIPTOR_TYPE_UNIFORM_TEXEL_BUFFER, texel_buffers}}};
  VkDescriptorPoolCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO;
  info.maxSets = sets_of_a_pool;
  info.poolSizeCount = static_cast<uint32_t>(sizes.size());
  info.pPoolSizes = sizes.data();
  VkDescriptorPool pool = VK_NULL_HANDLE;
  check(device_.vk.CreateDescriptorPool(device_.handle, &info, nullptr, &pool), "vkCreateDescriptorPool");
  return pool;
}

VkDescriptorSet Commands::allocate_set(VkDescriptorSetLayout layout) {
  for (;; ++current_) {
    const bool fresh = current_ == sets_.size();
    if (fresh) {
      sets_.reserve(sets_.size() + 1); // so that no pool is lost
      sets_.push_back(create_pool());
    }
    VkDescriptorSetAllocateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO;
    info.descriptorPool = sets_[current_];
    info.descriptorSetCount = 1;
    info.pSetLayouts = &layout;
    VkDescriptorSet set = VK_NULL_HANDLE;
    const VkResult result = device_.vk.AllocateDescriptorSets(device_.handle, &info, &set);
    if (result == VK_SUCCESS)
      return set;
    if (fresh || (result != VK_ERROR_OUT_OF_POOL_MEMORY && result != VK_ERROR_FRAGMENTED_POOL))
      check(result, "vkAllocateDescriptorSets");
  }
}

namespace {

// Formats that every device reads through uniform texel buffers.
VkFormat format_of(BindingType type) {
  switch (type) {
  case BindingType::texel_float16:
    return VK_FORMAT_R16G16B16A16_SFLOAT;
  case BindingType::texel_uint8:
    return VK_FORMAT_R8G8B8A8_UINT;
  default:
    return VK_FORMAT_R32G32B32A32_SFLOAT;
  }
}

} // namespace

VkBufferView Commands::create_view(const hal::Region& region, BindingType type) {
  VkBufferViewCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_BUFFER_VIEW_CREATE_INFO;
  info.buffer = handle_of(region);
  info.format = format_of(type);
  info.offset = region.offset;
  info.range = region.size;
  views_.reserve(views_.size() + 1); // so that no view is lost
  VkBufferView view = VK_NULL_HANDLE;
  check(device_.vk.CreateBufferView(device_.handle, &info, nullptr, &view), "vkCreateBufferView");
  views_.push_back(view);
  return view;
}

Commands::Set Commands::prepare(const hal::Pipeline& of, std::span<const hal::Region> bindings) {
  const auto& pipeline = static_cast<const Pipeline&>(of);
  const VkDescriptorSet set = allocate_set(pipeline.set_layout);
  std::array<VkDescriptorBufferInfo, max_bindings> infos;
  std::array<VkBufferView, max_bindings> texels;
  std::array<VkWriteDescriptorSet, max_bindings> writes;
  for (size_t i = 0; i < bindings.size(); ++i) {
    const hal::Region& region = bindings[i];
    VkWriteDescriptorSet& write = writes[i] = descriptor_write(i, pipeline.types[i]);
    write.dstSet = set;
    if (pipeline.types[i] == BindingType::storage) {
      infos[i] = {handle_of(region), region.offset, region.size};
      write.pBufferInfo = &infos[i];
    } else {
      texels[i] = create_view(region, pipeline.types[i]);
      write.pTexelBufferView = &texels[i];
    }
  }
  device_.vk.UpdateDescriptorSets(device_.handle, static_cast<uint32_t>(bindings.size()), writes.data(), 0, nullptr);
  return reinterpret_cast<Set>(set);
}

void Commands::push(const Pipeline& pipeline, std::span<const hal::Region> bindings) {
  std::array<VkDescriptorBufferInfo, max_bindings> infos;
  std::array<VkWriteDescriptorSet, max_bindings> writes;
  for (size_t i = 0; i < bindings.size(); ++i) {
    infos[i] = {handle_of(bindings[i]), bindings[i].offset, bindings[i].size};
    writes[i] = descriptor_write(i, BindingType::storage);
    writes[i].pBufferInfo = &infos[i];
  }
  device_.vk.CmdPushDescriptorSetKHR(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0,
                                     static_cast<uint32_t>(bindings.size()), writes.data());
}

void Commands::dispatch(const hal::Pipeline& of, Set set, std::span<const hal::Region> bindings,
                        std::span<const uint32_t> params, const std::array<uint32_t, 3>& groups) {
  const DeviceFunctions& vk = device_.vk;
  const auto& pipeline = static_cast<const Pipeline&>(of);
  if (bound_ != pipeline.handle)
    vk.CmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  bound_ = pipeline.handle;
  if (pipeline.uses_sets) {
    const auto descriptors = reinterpret_cast<VkDescriptorSet>(set);
    vk.CmdBindDescriptorSets(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0, 1, &descriptors, 0,
                             nullptr);
  } else {
    push(pipeline, bindings);
  }
  if (!params.empty())
    vk.CmdPushConstants(commands_, pipeline.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                        static_cast<uint32_t>(params.size_bytes()), params.data());
  vk.CmdDispatch(commands_, groups[0], groups[1], groups[2]);
}

} // namespace lapilli::vulkan
