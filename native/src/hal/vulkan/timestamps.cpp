#include "hal/vulkan/timestamps.h"

#include "hal/vulkan/commands.h"

namespace lapilli::vulkan {

Timestamps::Timestamps(const Device& device, uint32_t count) : device_(device), count_(count) {
  VkQueryPoolCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO;
  info.queryType = VK_QUERY_TYPE_TIMESTAMP;
  info.queryCount = count;
  check(device.vk.CreateQueryPool(device.handle, &info, nullptr, &pool_), "vkCreateQueryPool");
}

Timestamps::~Timestamps() { device_.vk.DestroyQueryPool(device_.handle, pool_, nullptr); }

void Timestamps::reset(hal::Commands& commands) {
  device_.vk.CmdResetQueryPool(static_cast<Commands&>(commands).handle(), pool_, 0, count_);
}

void Timestamps::write(hal::Commands& commands, uint32_t index) {
  device_.vk.CmdWriteTimestamp(static_cast<Commands&>(commands).handle(), VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, pool_,
                               index);
}

std::vector<uint64_t> Timestamps::ticks() {
  std::vector<uint64_t> result(count_);
  device_.check(device_.vk.GetQueryPoolResults(device_.handle, pool_, 0, count_, count_ * sizeof(uint64_t),
                                               result.data(), sizeof(uint64_t),
                                               VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
                "vkGetQueryPoolResults");
  return result;
}

} // namespace lapilli::vulkan
