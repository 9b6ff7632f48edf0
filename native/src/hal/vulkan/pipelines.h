// The compute pipelines of the kernels that a program uses.
#pragma once

#include "hal/vulkan/device.h"

#include <map>
#include <thread>

namespace lapilli::vulkan {

// Where the device has it, its descriptors are pushed into the commands: it uses no sets.
struct Pipeline final : hal::Pipeline {
  VkPipeline handle = VK_NULL_HANDLE;
  VkPipelineLayout layout = VK_NULL_HANDLE;
  VkDescriptorSetLayout set_layout = VK_NULL_HANDLE;
  std::vector<BindingType> types;
};

inline VkDescriptorType descriptor_type(BindingType type) {
  return type == BindingType::storage ? VK_DESCRIPTOR_TYPE_STORAGE_BUFFER : VK_DESCRIPTOR_TYPE_UNIFORM_TEXEL_BUFFER;
}

// Pipelines are compiled by the driver, several on as many threads: construction starts them, finish() waits for them.
class Pipelines final : public hal::Pipelines {
public:
  // `used[i]`: kernel i is needed. `cache_folder` may be empty: no cache on disk.
  Pipelines(Device& device, std::span<const Kernel> kernels, const std::vector<bool>& used,
            const std::string& cache_folder);
  ~Pipelines() override;
  Pipelines(const Pipelines&) = delete;
  Pipelines& operator=(const Pipelines&) = delete;

  void finish() override;
  const hal::Pipeline& operator[](uint32_t kernel) const override { return pipelines_[kernel]; }
  Cache cache() const override { return {cache_.file(), cache_found_, compiled_}; }

private:
  void create_layouts(const Kernel& kernel, Pipeline& pipeline);
  void start(size_t count, std::span<const Kernel> kernels);
  void work(std::span<const Kernel> kernels);
  void create(const Kernel& kernel, Pipeline& pipeline);
  void join();
  void release();

  Device& device_;
  PipelineCache& cache_;
  const bool cache_found_;
  std::vector<Pipeline> pipelines_;
  using Types = std::vector<BindingType>;
  std::map<Types, VkDescriptorSetLayout> set_layouts_;
  std::map<std::pair<Types, uint32_t>, VkPipelineLayout> pipeline_layouts_; // by push constants too
  std::vector<uint32_t> queue_;                                             // kernels to compile
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> compiled_{0};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

} // namespace lapilli::vulkan
