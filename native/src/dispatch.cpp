#include "dispatch.h"

#include "error.h"

#include <algorithm>

namespace lapilli {

namespace {

Region resolve_binding(const Device& device, const Dispatch& command, const Binding& binding, const Values& values,
                       std::span<const Region> regions) {
  const Region& region = regions[binding.buffer];
  const VkPhysicalDeviceLimits& limits = device.capabilities.limits;
  const uint64_t offset = values.size(binding.offset, "the offset of a binding");
  const uint64_t size = values.size(binding.size, "the size of a binding");
  check_file(offset <= region.size && size <= region.size - offset, "The program is damaged: \"", command.label,
             "\" uses bytes ", offset, " to ", offset + size, " of a buffer of ", region.size, ".");
  if (size == 0)
    return {region.buffer, region.offset, 4}; // nothing is read or written, and Vulkan wants a range
  check_file(offset % limits.minStorageBufferOffsetAlignment == 0, "The program cannot run on ",
             device.capabilities.name, ": \"", command.label, "\" uses a buffer from offset ", offset,
             ", and the device wants multiples of ", limits.minStorageBufferOffsetAlignment, ".");
  if (size > limits.maxStorageBufferRange)
    fail(LAPILLI_NO_DEVICE, device.capabilities.name, " cannot use ", human_size(size), " of a buffer at once, as \"",
         command.label, "\" must for these inputs: its limit is ", human_size(limits.maxStorageBufferRange),
         ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
  return {region.buffer, region.offset + offset, size};
}

} // namespace

ResolvedDispatch resolve(const Device& device, const Dispatch& command, const Values& values,
                         std::span<const Region> regions) {
  ResolvedDispatch result;
  const VkPhysicalDeviceLimits& limits = device.capabilities.limits;
  for (size_t i = 0; i < 3; ++i) {
    const uint64_t count = values.size(command.groups[i], "a number of work groups");
    if (count > limits.maxComputeWorkGroupCount[i])
      fail(LAPILLI_NO_DEVICE, "\"", command.label, "\" needs ", count, " work groups along axis ", i,
           " for these inputs, and ", device.capabilities.name, " allows ", limits.maxComputeWorkGroupCount[i],
           ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
    result.groups[i] = static_cast<uint32_t>(count);
  }
  if (result.empty())
    return result;
  for (size_t i = 0; i < command.params.size(); ++i)
    result.params[i] = static_cast<uint32_t>(static_cast<uint64_t>(values[command.params[i]]));
  for (size_t i = 0; i < command.bindings.size(); ++i)
    result.bindings[i] = resolve_binding(device, command, command.bindings[i], values, regions);
  return result;
}

DescriptorSets::DescriptorSets(Device& device, std::span<const Dispatch> commands, const Pipelines& pipelines)
    : device_(device), sets_(commands.size()) {
  uint32_t buffers = 0;
  std::vector<VkDescriptorSetLayout> layouts;
  for (const Dispatch& command : commands) {
    buffers += static_cast<uint32_t>(command.bindings.size());
    layouts.push_back(pipelines[command.kernel].set_layout);
  }
  if (commands.empty())
    return;
  const VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, std::max(buffers, 1u)};
  VkDescriptorPoolCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO;
  info.maxSets = static_cast<uint32_t>(commands.size());
  info.poolSizeCount = 1;
  info.pPoolSizes = &size;
  check(device.vk.CreateDescriptorPool(device.handle, &info, nullptr, &pool_), "vkCreateDescriptorPool");
  VkDescriptorSetAllocateInfo allocate{};
  allocate.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO;
  allocate.descriptorPool = pool_;
  allocate.descriptorSetCount = info.maxSets;
  allocate.pSetLayouts = layouts.data();
  const VkResult result = device.vk.AllocateDescriptorSets(device.handle, &allocate, sets_.data());
  if (result != VK_SUCCESS) {
    device.vk.DestroyDescriptorPool(device.handle, pool_, nullptr);
    check(result, "vkAllocateDescriptorSets");
  }
}

DescriptorSets::~DescriptorSets() { device_.vk.DestroyDescriptorPool(device_.handle, pool_, nullptr); }

void DescriptorSets::update(size_t command, const Dispatch& dispatch, const ResolvedDispatch& resolved) {
  const size_t count = dispatch.bindings.size();
  if (count == 0 || resolved.empty())
    return;
  std::array<VkDescriptorBufferInfo, max_bindings> infos{};
  for (size_t i = 0; i < count; ++i)
    infos[i] = {resolved.bindings[i].buffer, resolved.bindings[i].offset, resolved.bindings[i].size};
  VkWriteDescriptorSet write{};
  write.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
  write.dstSet = sets_[command];
  write.descriptorCount = static_cast<uint32_t>(count); // continues over the following bindings
  write.descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
  write.pBufferInfo = infos.data();
  device_.vk.UpdateDescriptorSets(device_.handle, 1, &write, 0, nullptr);
}

void record(const Device& device, VkCommandBuffer commands, const Dispatch& dispatch, const ResolvedDispatch& resolved,
            const Pipeline& pipeline, VkDescriptorSet set) {
  const DeviceFunctions& vk = device.vk;
  vk.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  vk.CmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0, 1, &set, 0, nullptr);
  if (!dispatch.params.empty())
    vk.CmdPushConstants(commands, pipeline.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                        static_cast<uint32_t>(dispatch.params.size() * 4), resolved.params.data());
  vk.CmdDispatch(commands, resolved.groups[0], resolved.groups[1], resolved.groups[2]);
}

void barrier(const Device& device, VkCommandBuffer commands, Stage from, Stage to) {
  VkMemoryBarrier info{};
  info.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER;
  info.srcAccessMask = from.access;
  info.dstAccessMask = to.access;
  device.vk.CmdPipelineBarrier(commands, from.stages, to.stages, 0, 1, &info, 0, nullptr, 0, nullptr);
}

} // namespace lapilli
