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
  void submit();
  // False: not finished within that time. Afterwards nothing is kept alive any more.
  bool wait(uint64_t timeout);

  VkCommandBuffer commands() const { return commands_; }
  uint64_t id() const { return id_; } // of what is recorded now; no two batches of the process have the same

  // Binds the pipeline and these parts of buffers; `bindings`: at least one per binding of the kernel.
  void bind(const Pipeline& pipeline, const Kernel& kernel, std::span<const Region> bindings);
  void keep(std::shared_ptr<Program> program) { programs_.push_back(std::move(program)); }

  uint64_t staged = 0; // where the staging ring was when this was submitted

private:
  VkDescriptorSet allocate_set(VkDescriptorSetLayout layout);
  VkDescriptorPool create_pool();
  void let_go() noexcept;

  Device& device_;
  Commands pool_;
  VkCommandBuffer commands_;
  uint64_t id_ = 0;
  std::vector<VkDescriptorPool> sets_;
  size_t current_ = 0; // the pool that sets are taken from
  VkPipeline bound_ = VK_NULL_HANDLE;
  std::vector<VkBufferView> views_;
  std::vector<std::shared_ptr<Program>> programs_;
};

} // namespace lapilli
