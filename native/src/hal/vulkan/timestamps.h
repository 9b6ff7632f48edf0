// Points of time between commands: a query pool.
#pragma once

#include "hal/vulkan/device.h"

namespace lapilli::vulkan {

class Timestamps final : public hal::Timestamps {
public:
  Timestamps(const Device& device, uint32_t count);
  ~Timestamps() override;

  void reset(hal::Commands& commands) override;
  void write(hal::Commands& commands, uint32_t index) override;
  std::vector<uint64_t> ticks() override;

private:
  const Device& device_;
  const uint32_t count_;
  VkQueryPool pool_ = VK_NULL_HANDLE;
};

} // namespace lapilli::vulkan
