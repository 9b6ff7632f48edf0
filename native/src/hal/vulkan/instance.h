// The Vulkan loader, opened at run time, and an instance.
#pragma once

#include "hal/driver.h"
#include "hal/vulkan/check.h"
#include "hal/vulkan/physical_device.h"

namespace lapilli::vulkan {

class Instance final : public hal::Driver {
public:
  explicit Instance(bool validation);
  explicit Instance(const lapilli_vulkan& given); // of the application, with the one device that it gives
  ~Instance() override;

  uint32_t count() const override { return static_cast<uint32_t>(devices.size()); }
  const hal::Capabilities& capabilities(uint32_t index) const override { return devices[index].capabilities; }
  std::shared_ptr<hal::Device> open(uint32_t index) override;

  InstanceFunctions vk;
  VkInstance handle = VK_NULL_HANDLE;
  bool validation = false;
  PFN_vkGetInstanceProcAddr get_proc = nullptr;
  std::vector<PhysicalDevice> devices;

private:
  void prepare();
  void release();
  void enumerate();

  const bool taken_ = false;
  VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
};

} // namespace lapilli::vulkan
