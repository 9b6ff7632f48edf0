// From a command of a plan and the sizes of a run to what Vulkan records.
#pragma once

#include "expr.h"
#include "memory.h"
#include "pipelines.h"

namespace lapilli {

// A command with all its expressions computed and checked against its buffers and the device.
struct ResolvedDispatch {
  std::array<uint32_t, 3> groups{};
  std::array<uint32_t, max_push_size / 4> params{};
  std::array<Region, max_bindings> bindings{};

  bool empty() const { return groups[0] == 0 || groups[1] == 0 || groups[2] == 0; }
};

// `regions[i]`: where buffer i of the plan is; `most_groups`: work groups that a command may have.
ResolvedDispatch resolve(const Device& device, const Dispatch& command, const Kernel& kernel, const Values& values,
                         std::span<const Region> regions, uint64_t most_groups);

// Throws where a buffer of `size` bytes does not hold what it is for, or much more.
void check_room(uint64_t size, uint64_t tensor, const Buffer& buffer);

// A descriptor set for each of a list of commands whose pipelines do not push descriptors.
class DescriptorSets {
public:
  DescriptorSets(Device& device, std::span<const Dispatch> commands, std::span<const Kernel> kernels,
                 const Pipelines& pipelines);
  ~DescriptorSets();
  DescriptorSets(const DescriptorSets&) = delete;
  DescriptorSets& operator=(const DescriptorSets&) = delete;

  void update(size_t command, const Kernel& kernel, const ResolvedDispatch& resolved);
  // Null for a command that needs none.
  VkDescriptorSet operator[](size_t command) const { return sets_[command]; }

private:
  Device& device_;
  VkDescriptorPool pool_ = VK_NULL_HANDLE;
  std::vector<VkDescriptorSet> sets_;
  std::vector<std::vector<VkBufferView>> views_; // of texel buffers, for each command
};

// Points the set at these parts of buffers, one per binding of the kernel. The views of texel buffers that it makes are
// added to `views`, and live as long as the set is used.
void write_descriptors(Device& device, VkDescriptorSet set, const Kernel& kernel, std::span<const Region> bindings,
                       std::vector<VkBufferView>& views);

// The same for what is recorded next, where the pipeline pushes descriptors.
void push_descriptors(const Device& device, VkCommandBuffer commands, const Pipeline& pipeline,
                      std::span<const Region> bindings);

// Binds the pipeline, the descriptors and the push constants, and dispatches. `set` is used where the pipeline does not
// push descriptors.
void record(const Device& device, VkCommandBuffer commands, const Dispatch& dispatch, const ResolvedDispatch& resolved,
            const Pipeline& pipeline, VkDescriptorSet set);

// One memory barrier between stages.
struct Stage {
  VkPipelineStageFlags stages;
  VkAccessFlags access;
};
namespace stage {
inline constexpr Stage host_write{VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_WRITE_BIT};
inline constexpr Stage host_read{VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_READ_BIT};
inline constexpr Stage compute_write{VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_WRITE_BIT};
inline constexpr Stage compute_read{VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_READ_BIT};
inline constexpr Stage compute{VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                               VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT};
inline constexpr Stage transfer_write{VK_PIPELINE_STAGE_TRANSFER_BIT, VK_ACCESS_TRANSFER_WRITE_BIT};
inline constexpr Stage transfer_read{VK_PIPELINE_STAGE_TRANSFER_BIT, VK_ACCESS_TRANSFER_READ_BIT};
} // namespace stage
constexpr Stage operator|(Stage a, Stage b) { return {a.stages | b.stages, a.access | b.access}; }
void barrier(const Device& device, VkCommandBuffer commands, Stage from, Stage to);

} // namespace lapilli
