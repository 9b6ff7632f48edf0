#include "hal/vulkan/pipelines.h"

#include "base/error.h"
#include "format/spirv_clamp.h"

#include <algorithm>
#include <cstring>
#include <system_error>

namespace lapilli::vulkan {

Pipelines::Pipelines(Device& device, std::span<const Kernel> kernels, const std::vector<bool>& used,
                     const std::string& cache_folder)
    : device_(device), cache_(device.pipeline_cache(cache_folder)), cache_found_(cache_.found()),
      pipelines_(kernels.size()) {
  try {
    for (uint32_t i = 0; i < kernels.size(); ++i)
      if (used[i]) {
        create_layouts(kernels[i], pipelines_[i]);
        queue_.push_back(i);
      }
    // The largest kernels take the longest: they go first.
    std::ranges::stable_sort(queue_, std::greater{}, [&](uint32_t i) { return kernels[i].code.size(); });
    const size_t count = std::min<size_t>({queue_.size(), std::max(1u, std::thread::hardware_concurrency()), 8});
    start(count, kernels);
  } catch (...) {
    release();
    throw;
  }
}

Pipelines::~Pipelines() { release(); }

void Pipelines::release() {
  join();
  const DeviceFunctions& vk = device_.vk;
  for (const Pipeline& pipeline : pipelines_)
    vk.DestroyPipeline(device_.handle, pipeline.handle, nullptr);
  for (const auto& [key, layout] : pipeline_layouts_)
    vk.DestroyPipelineLayout(device_.handle, layout, nullptr);
  for (const auto& [key, layout] : set_layouts_)
    vk.DestroyDescriptorSetLayout(device_.handle, layout, nullptr);
}

void Pipelines::start(size_t count, std::span<const Kernel> kernels) {
  if (count == 1) // a thread would cost more than it saves
    return work(kernels);
  try {
    for (size_t i = 0; i < count; ++i)
      threads_.emplace_back([this, kernels] { work(kernels); });
  } catch (const std::system_error&) {
    if (threads_.empty()) // the system gives no more threads
      work(kernels);
  }
}

void Pipelines::join() {
  for (std::thread& thread : threads_)
    thread.join();
  threads_.clear();
}

void Pipelines::create_layouts(const Kernel& kernel, Pipeline& pipeline) {
  const DeviceFunctions& vk = device_.vk;
  // All devices that push descriptors push 32, and views of texel buffers would have to be kept somewhere anyway.
  static_assert(max_bindings <= 32);
  const bool pushes = device_.physical.extensions.push_descriptor && kernel.bindings > 0 &&
                      std::ranges::all_of(kernel.types, [](BindingType type) { return type == BindingType::storage; });
  VkDescriptorSetLayout& set_layout = set_layouts_[kernel.types];
  if (set_layout == VK_NULL_HANDLE) {
    std::vector<VkDescriptorSetLayoutBinding> bindings(kernel.bindings);
    for (uint32_t i = 0; i < kernel.bindings; ++i)
      bindings[i] = {i, descriptor_type(kernel.types[i]), 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr};
    VkDescriptorSetLayoutCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO;
    info.flags = pushes ? VK_DESCRIPTOR_SET_LAYOUT_CREATE_PUSH_DESCRIPTOR_BIT_KHR : 0;
    info.bindingCount = kernel.bindings;
    info.pBindings = bindings.data();
    check(vk.CreateDescriptorSetLayout(device_.handle, &info, nullptr, &set_layout), "vkCreateDescriptorSetLayout");
  }
  VkPipelineLayout& layout = pipeline_layouts_[{kernel.types, kernel.push_size}];
  if (layout == VK_NULL_HANDLE) {
    const VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, kernel.push_size};
    VkPipelineLayoutCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO;
    info.setLayoutCount = 1;
    info.pSetLayouts = &set_layout;
    info.pushConstantRangeCount = kernel.push_size > 0 ? 1 : 0;
    info.pPushConstantRanges = &range;
    check(vk.CreatePipelineLayout(device_.handle, &info, nullptr, &layout), "vkCreatePipelineLayout");
  }
  pipeline.uses_sets = !pushes;
  pipeline.types = kernel.types;
  pipeline.set_layout = set_layout;
  pipeline.layout = layout;
}

void Pipelines::work(std::span<const Kernel> kernels) {
  try {
    for (size_t i = next_++; i < queue_.size(); i = next_++)
      create(kernels[queue_[i]], pipelines_[queue_[i]]);
  } catch (...) {
    const std::lock_guard lock(error_mutex_);
    if (!error_)
      error_ = std::current_exception();
    next_ = queue_.size(); // the other threads stop too
  }
}

void Pipelines::create(const Kernel& kernel, Pipeline& pipeline) {
  const DeviceFunctions& vk = device_.vk;
  const hal::Capabilities& capabilities = device_.capabilities;
  const std::vector<uint32_t> code = with_float_controls(
      capabilities.is_cpu() ? clamp_indices(kernel.code) : kernel.code, capabilities.float_controls);
  VkShaderModuleCreateInfo module_info{};
  module_info.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO;
  module_info.codeSize = code.size() * 4;
  module_info.pCode = code.data();
  VkShaderModule module = VK_NULL_HANDLE;
  check(vk.CreateShaderModule(device_.handle, &module_info, nullptr, &module), "vkCreateShaderModule");

  VkComputePipelineCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO;
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = module;
  info.stage.pName = kernel.entry_point.c_str();
  info.layout = pipeline.layout;
  VkPipelineShaderStageRequiredSubgroupSizeCreateInfo subgroup{};
  if (kernel.subgroup_size != 0 && capabilities.has(Feature::subgroup_size_control)) {
    subgroup.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO;
    subgroup.requiredSubgroupSize = kernel.subgroup_size;
    info.stage.pNext = &subgroup;
    if (device_.physical.full_subgroups && kernel.local[0] % kernel.subgroup_size == 0)
      info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
  }
  VkPipelineCreationFeedback feedback{};
  VkPipelineCreationFeedback stage_feedback{};
  VkPipelineCreationFeedbackCreateInfo feedback_info{};
  if (device_.physical.extensions.creation_feedback) {
    feedback_info.sType = VK_STRUCTURE_TYPE_PIPELINE_CREATION_FEEDBACK_CREATE_INFO;
    feedback_info.pPipelineCreationFeedback = &feedback;
    feedback_info.pipelineStageCreationFeedbackCount = 1;
    feedback_info.pPipelineStageCreationFeedbacks = &stage_feedback;
    info.pNext = &feedback_info;
  }
  const VkResult result =
      vk.CreateComputePipelines(device_.handle, cache_.handle(), 1, &info, nullptr, &pipeline.handle);
  vk.DestroyShaderModule(device_.handle, module, nullptr);
  if (result != VK_SUCCESS && result != VK_ERROR_OUT_OF_HOST_MEMORY && result != VK_ERROR_OUT_OF_DEVICE_MEMORY &&
      result != VK_ERROR_DEVICE_LOST)
    fail(LAPILLI_INTERNAL, "The driver of ", capabilities.name, " (", capabilities.driver, ") cannot compile kernel \"",
         kernel.name, "\" (Vulkan result ", static_cast<int>(result),
         "). Update the driver, or choose another plan or device.");
  check(result, "vkCreateComputePipelines");
  const bool hit = (feedback.flags & VK_PIPELINE_CREATION_FEEDBACK_VALID_BIT) != 0 &&
                   (feedback.flags & VK_PIPELINE_CREATION_FEEDBACK_APPLICATION_PIPELINE_CACHE_HIT_BIT) != 0;
  if (!hit)
    ++compiled_;
}

void Pipelines::finish() {
  join();
  if (error_)
    std::rethrow_exception(error_);
  if (compiled_ > 0)
    cache_.store();
}

} // namespace lapilli::vulkan
