#include "batch.h"

namespace lapilli {

namespace {

constexpr uint32_t sets_of_a_pool = 256;
constexpr uint32_t storage_buffers = 4 * sets_of_a_pool;
constexpr uint32_t texel_buffers = 2 * sets_of_a_pool;

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

} // namespace

Batch::Batch(Device& device, Queue& queue) : device_(device), pool_(device, &queue), commands_(pool_.allocate()) {}

Batch::~Batch() {
  let_go();
  for (const VkDescriptorPool pool : sets_)
    device_.vk.DestroyDescriptorPool(device_.handle, pool, nullptr);
}

void Batch::begin() {
  pool_.begin(commands_);
  id_ = next_id();
  bound_ = VK_NULL_HANDLE;
  ended_ = false;
}

void Batch::end() {
  pool_.end(commands_);
  ended_ = true;
}

void Batch::submit() { pool_.submit(commands_); }

bool Batch::wait(uint64_t timeout) {
  if (!pool_.wait(timeout))
    return false;
  let_go();
  return true;
}

void Batch::let_go() noexcept {
  for (size_t i = 0; i < sets_.size() && i <= current_; ++i)
    device_.vk.ResetDescriptorPool(device_.handle, sets_[i], 0);
  current_ = 0;
  for (const VkBufferView view : views_)
    device_.vk.DestroyBufferView(device_.handle, view, nullptr);
  views_.clear();
  programs_.clear();
}

VkDescriptorPool Batch::create_pool() {
  const std::array<VkDescriptorPoolSize, 2> sizes{{{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, storage_buffers},
                                                   {VK_DESCRIPTOR_TYPE_UNIFORM_TEXEL_BUFFER, texel_buffers}}};
  VkDescriptorPoolCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO;
  info.maxSets = sets_of_a_pool;
  info.poolSizeCount = static_cast<uint32_t>(sizes.size());
  info.pPoolSizes = sizes.data();
  VkDescriptorPool pool = VK_NULL_HANDLE;
  check(device_.vk.CreateDescriptorPool(device_.handle, &info, nullptr, &pool), "vkCreateDescriptorPool");
  return pool;
}

VkDescriptorSet Batch::allocate_set(VkDescriptorSetLayout layout) {
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

VkDescriptorSet Batch::set_for(const Pipeline& pipeline, const Kernel& kernel, std::span<const Region> bindings) {
  if (pipeline.pushes)
    return VK_NULL_HANDLE;
  const VkDescriptorSet set = allocate_set(pipeline.set_layout);
  write_descriptors(device_, set, kernel, bindings.first(kernel.bindings), views_);
  return set;
}

void Batch::bind(const Pipeline& pipeline, const Kernel& kernel, VkDescriptorSet set, std::span<const Region> bindings) {
  if (bound_ != pipeline.handle)
    device_.vk.CmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  bound_ = pipeline.handle;
  if (pipeline.pushes)
    return push_descriptors(device_, commands_, pipeline, bindings.first(kernel.bindings));
  device_.vk.CmdBindDescriptorSets(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0, 1, &set, 0, nullptr);
}

} // namespace lapilli
