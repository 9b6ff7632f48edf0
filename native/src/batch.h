// Commands that are submitted together, and what must live until the device has finished them.
#pragma once

#include "program.h"

namespace lapilli {

class Batch {
public:
  Batch(Device& device, Queue& queue);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void begin();
  // Nothing can be recorded after this, and what was recorded waits to be submitted. Where it throws, it is lost.
  void end();
  bool ended() const { return ended_; }
  void submit(); // once it is ended; where it throws OUT_OF_MEMORY, it can be called again
  // False: not finished within that time. Afterwards nothing is kept alive any more.
  bool wait(uint64_t timeout);

  VkCommandBuffer commands() const { return commands_; }
  uint64_t id() const { return id_; } // of what is recorded now; no two batches of the process have the same

  // What can fail of binding these parts of buffers (at least one per binding of the kernel) is done before anything is
  // recorded. Null where the pipeline pushes its descriptors.
  VkDescriptorSet set_for(const Pipeline& pipeline, const Kernel& kernel, std::span<const Region> bindings);
  // Binds the pipeline, and the set or the parts of buffers.
  void bind(const Pipeline& pipeline, const Kernel& kernel, VkDescriptorSet set, std::span<const Region> bindings);
  void keep(std::shared_ptr<Program> program) { programs_.push_back(std::move(program)); }
  std::span<const std::shared_ptr<Program>> programs() const { return programs_; }

  uint64_t staged = 0; // where the staging ring was when this was submitted

private:
  VkDescriptorSet allocate_set(VkDescriptorSetLayout layout);
  VkDescriptorPool create_pool();
  void let_go() noexcept;

  Device& device_;
  Commands pool_;
  VkCommandBuffer commands_;
  uint64_t id_ = 0;
  bool ended_ = false;
  std::vector<VkDescriptorPool> sets_;
  size_t current_ = 0; // the pool that sets are taken from
  VkPipeline bound_ = VK_NULL_HANDLE;
  std::vector<VkBufferView> views_;
  std::vector<std::shared_ptr<Program>> programs_;
};

} // namespace lapilli
