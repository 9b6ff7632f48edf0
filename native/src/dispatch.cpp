#include "dispatch.h"

#include "error.h"
#include "file_limits.h"

#include <algorithm>

namespace lapilli {

namespace {

Region resolve_binding(const Device& device, const Dispatch& command, const Binding& binding, BindingType type,
                       const Values& values, std::span<const Region> regions) {
  const Region& region = regions[binding.buffer];
  const VkPhysicalDeviceLimits& limits = device.capabilities.limits;
  const uint64_t offset = values.size(binding.offset, "the offset of a binding");
  const uint64_t size = values.size(binding.size, "the size of a binding");
  check_file(offset <= region.size && size <= region.size - offset, "The program is damaged: \"", command.label,
             "\" uses bytes ", offset, " to ", offset + size, " of a buffer of ", region.size, ".");
  const uint32_t texel = texel_size(type);
  if (size == 0)
    return {region.buffer, region.offset, texel != 0 ? texel : 4}; // nothing is read or written; Vulkan wants a range
  const uint64_t alignment = texel != 0 ? limits.minTexelBufferOffsetAlignment : limits.minStorageBufferOffsetAlignment;
  check_file(offset % alignment == 0, "The program cannot run on ", device.capabilities.name, ": \"", command.label,
             "\" uses a buffer from offset ", offset, ", and the device wants multiples of ", alignment, ".");
  const uint64_t limit =
      texel != 0 ? uint64_t{limits.maxTexelBufferElements} * texel : uint64_t{limits.maxStorageBufferRange};
  if (size > limit)
    fail(LAPILLI_NO_DEVICE, device.capabilities.name, " cannot use ", human_size(size), " of a buffer at once, as \"",
         command.label, "\" must for these inputs: its limit is ", human_size(limit),
         ". Run smaller inputs, choose another device with LAPILLI_DEVICE, or compile with a bound of every open size "
         "(torch.export.Dim(name, max=...)): values that may be larger than 128 MiB are then bound in parts.");
  if (texel == 0)
    return {region.buffer, region.offset + offset, size};
  // Texel buffers hold whole elements, and see a little of the padding that the planner leaves (see `room` there).
  const uint64_t whole = align_up(size, texel);
  const bool padded =
      device.capabilities.is_cpu() && offset == 0 && (whole >> 8 & 0xff) == 0 && whole + 256 <= limit;
  return {region.buffer, region.offset + offset, padded ? whole + 256 : whole};
}

} // namespace

ResolvedDispatch resolve(const Device& device, const Dispatch& command, const Kernel& kernel, const Values& values,
                         std::span<const Region> regions, uint64_t most_groups) {
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
  const uint64_t plane = uint64_t{result.groups[0]} * result.groups[1];
  check_file(plane <= most_groups / result.groups[2], "\"", command.label, "\" has ", result.groups[0], " x ",
             result.groups[1], " x ", result.groups[2], " work groups, and the limit is ", most_groups, " (groups).");
  for (size_t i = 0; i < command.params.size(); ++i)
    result.params[i] = static_cast<uint32_t>(static_cast<uint64_t>(values[command.params[i]]));
  for (size_t i = 0; i < command.bindings.size(); ++i)
    result.bindings[i] = resolve_binding(device, command, command.bindings[i], kernel.types[i], values, regions);
  return result;
}

void check_room(uint64_t size, uint64_t tensor, const Buffer& buffer) {
  check_file(size >= tensor && size - tensor <= max_padding, "The program is damaged: buffer \"", buffer.name, "\" of ",
             size, " bytes is ", size < tensor ? "smaller" : "much larger", " than what it is for, ", tensor, " bytes.");
}

DescriptorSets::DescriptorSets(Device& device, std::span<const Dispatch> commands, std::span<const Kernel> kernels,
                               const Pipelines& pipelines)
    : device_(device), sets_(commands.size()), views_(commands.size()) {
  uint32_t storage = 0, texel = 0;
  std::vector<VkDescriptorSetLayout> layouts;
  for (const Dispatch& command : commands) {
    const Pipeline& pipeline = pipelines[command.kernel];
    if (pipeline.pushes)
      continue;
    for (const BindingType type : kernels[command.kernel].types)
      ++(type == BindingType::storage ? storage : texel);
    layouts.push_back(pipeline.set_layout);
  }
  if (layouts.empty())
    return;
  const std::array<VkDescriptorPoolSize, 2> sizes{
      {{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, std::max(storage, 1u)}, {VK_DESCRIPTOR_TYPE_UNIFORM_TEXEL_BUFFER, texel}}};
  VkDescriptorPoolCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO;
  info.maxSets = static_cast<uint32_t>(layouts.size());
  info.poolSizeCount = texel > 0 ? 2 : 1;
  info.pPoolSizes = sizes.data();
  std::vector<VkDescriptorSet> sets(layouts.size());
  check(device.vk.CreateDescriptorPool(device.handle, &info, nullptr, &pool_), "vkCreateDescriptorPool");
  VkDescriptorSetAllocateInfo allocate{};
  allocate.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO;
  allocate.descriptorPool = pool_;
  allocate.descriptorSetCount = info.maxSets;
  allocate.pSetLayouts = layouts.data();
  const VkResult result = device.vk.AllocateDescriptorSets(device.handle, &allocate, sets.data());
  if (result != VK_SUCCESS) {
    device.vk.DestroyDescriptorPool(device.handle, pool_, nullptr);
    check(result, "vkAllocateDescriptorSets");
  }
  for (size_t i = 0, next = 0; i < commands.size(); ++i)
    if (!pipelines[commands[i].kernel].pushes)
      sets_[i] = sets[next++];
}

DescriptorSets::~DescriptorSets() {
  for (const auto& views : views_)
    for (const VkBufferView view : views)
      device_.vk.DestroyBufferView(device_.handle, view, nullptr);
  device_.vk.DestroyDescriptorPool(device_.handle, pool_, nullptr);
}

static VkBufferView create_view(const Device& device, const Region& region, BindingType type) {
  VkBufferViewCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_BUFFER_VIEW_CREATE_INFO;
  info.buffer = region.buffer;
  info.format = type == BindingType::texel_float16 ? VK_FORMAT_R16G16B16A16_SFLOAT : VK_FORMAT_R32G32B32A32_SFLOAT;
  info.offset = region.offset;
  info.range = region.size;
  VkBufferView view = VK_NULL_HANDLE;
  check(device.vk.CreateBufferView(device.handle, &info, nullptr, &view), "vkCreateBufferView");
  return view;
}

void DescriptorSets::update(size_t command, const Kernel& kernel, const ResolvedDispatch& resolved) {
  std::vector<VkBufferView>& views = views_[command];
  for (const VkBufferView view : views)
    device_.vk.DestroyBufferView(device_.handle, view, nullptr);
  views.clear();
  if (sets_[command] != VK_NULL_HANDLE && kernel.bindings > 0 && !resolved.empty())
    write_descriptors(device_, sets_[command], kernel, resolved.bindings, views);
}

static VkWriteDescriptorSet descriptor_write(size_t binding, BindingType type) {
  VkWriteDescriptorSet write{};
  write.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
  write.dstBinding = static_cast<uint32_t>(binding);
  write.descriptorCount = 1;
  write.descriptorType = descriptor_type(type);
  return write;
}

void write_descriptors(Device& device, VkDescriptorSet set, const Kernel& kernel, std::span<const Region> bindings,
                       std::vector<VkBufferView>& views) {
  std::array<VkDescriptorBufferInfo, max_bindings> infos;
  std::array<VkBufferView, max_bindings> texels;
  std::array<VkWriteDescriptorSet, max_bindings> writes;
  for (uint32_t i = 0; i < kernel.bindings; ++i) {
    const Region& region = bindings[i];
    VkWriteDescriptorSet& write = writes[i] = descriptor_write(i, kernel.types[i]);
    write.dstSet = set;
    if (kernel.types[i] == BindingType::storage) {
      infos[i] = {region.buffer, region.offset, region.size};
      write.pBufferInfo = &infos[i];
    } else {
      views.reserve(views.size() + 1); // so that no view is lost
      views.push_back(texels[i] = create_view(device, region, kernel.types[i]));
      write.pTexelBufferView = &texels[i];
    }
  }
  device.vk.UpdateDescriptorSets(device.handle, kernel.bindings, writes.data(), 0, nullptr);
}

void push_descriptors(const Device& device, VkCommandBuffer commands, const Pipeline& pipeline,
                      std::span<const Region> bindings) {
  std::array<VkDescriptorBufferInfo, max_bindings> infos;
  std::array<VkWriteDescriptorSet, max_bindings> writes;
  for (size_t i = 0; i < bindings.size(); ++i) {
    infos[i] = {bindings[i].buffer, bindings[i].offset, bindings[i].size};
    writes[i] = descriptor_write(i, BindingType::storage);
    writes[i].pBufferInfo = &infos[i];
  }
  device.vk.CmdPushDescriptorSetKHR(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0,
                                    static_cast<uint32_t>(bindings.size()), writes.data());
}

void record(const Device& device, VkCommandBuffer commands, const Dispatch& dispatch, const ResolvedDispatch& resolved,
            const Pipeline& pipeline, VkDescriptorSet set) {
  const DeviceFunctions& vk = device.vk;
  vk.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  if (pipeline.pushes)
    push_descriptors(device, commands, pipeline, std::span(resolved.bindings).first(dispatch.bindings.size()));
  else
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
