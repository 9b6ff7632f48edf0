#include "pipelines.h"

#include "error.h"
#include "pipeline_cache.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

Pipelines::Pipelines(Device& device, std::span<const Kernel> kernels, const std::vector<bool>& used,
                     const std::filesystem::path& cache_folder)
    : device_(device), pipelines_(kernels.size()) {
  try {
    std::vector<std::byte> known;
    if (!cache_folder.empty()) {
      cache_file_ = pipeline_cache_file(cache_folder, device.capabilities);
      known = read_pipeline_cache(cache_file_, device.capabilities);
      cache_found_ = !known.empty();
      cache_size_ = known.size();
    }
    VkPipelineCacheCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO;
    info.initialDataSize = known.size();
    info.pInitialData = known.data();
    check(device.vk.CreatePipelineCache(device.handle, &info, nullptr, &cache_), "vkCreatePipelineCache");
    for (uint32_t i = 0; i < kernels.size(); ++i)
      if (used[i]) {
        create_layouts(kernels[i], pipelines_[i]);
        queue_.push_back(i);
      }
    // The largest kernels take the longest: they go first.
    std::ranges::stable_sort(queue_, std::greater{}, [&](uint32_t i) { return kernels[i].code.size(); });
    const size_t count = std::min<size_t>({queue_.size(), std::max(1u, std::thread::hardware_concurrency()), 8});
    for (size_t i = 0; i < count; ++i)
      threads_.emplace_back([this, kernels] { work(kernels); });
  } catch (...) {
    join();
    this->~Pipelines();
    throw;
  }
}

Pipelines::~Pipelines() {
  join();
  const DeviceFunctions& vk = device_.vk;
  for (const Pipeline& pipeline : pipelines_)
    vk.DestroyPipeline(device_.handle, pipeline.handle, nullptr);
  for (const auto& [key, layout] : pipeline_layouts_)
    vk.DestroyPipelineLayout(device_.handle, layout, nullptr);
  for (const auto& [key, layout] : set_layouts_)
    vk.DestroyDescriptorSetLayout(device_.handle, layout, nullptr);
  vk.DestroyPipelineCache(device_.handle, cache_, nullptr);
}
