// A command buffer, with a fence to wait for it and the descriptor sets that it uses.
#pragma once

#include "hal/vulkan/device.h"
#include "hal/vulkan/pipelines.h"

namespace lapilli::vulkan {

class Commands final : public hal::Commands {
public:
  Commands(Device& device, Queue& queue);
  ~Commands() override;

  VkCommandBuffer handle() const { return commands_; }

  void begin() override;
  void end() override;
  void submit() override;
  bool wait(uint64_t timeout) override { return device_.wait(fence_, timeout); }
  void release() noexcept override;

  void barrier(hal::Stage from, hal::Stage to) override;
  void copy(const hal::Region& from, const hal::Region& to) override;
  void fill(const hal::Region& to, uint32_t word) override;
  Set prepare(const hal::Pipeline& pipeline, std::span<const hal::Region> bindings) override;
  void dispatch(const hal::Pipeline& pipeline, Set set, std::span<const hal::Region> bindings,
                std::span<const uint32_t> params, const std::array<uint32_t, 3>& groups) override;

private:
  void create();
  void destroy() noexcept;
  VkDescriptorSet allocate_set(VkDescriptorSetLayout layout);
  VkDescriptorPool create_pool();
  VkBufferView create_view(const hal::Region& region, BindingType type);
  void push(const Pipeline& pipeline, std::span<const hal::Region> bindings);

  Device& device_;
  Queue& queue_;
  VkCommandPool pool_ = VK_NULL_HANDLE;
  VkFence fence_ = VK_NULL_HANDLE;
  VkCommandBuffer commands_ = VK_NULL_HANDLE;
  VkPipeline bound_ = VK_NULL_HANDLE;
  std::vector<VkDescriptorPool> sets_;
  size_t current_ = 0;              // the pool that sets are taken from
  std::vector<VkBufferView> views_; // of texel buffers in the sets
};

} // namespace lapilli::vulkan
