// The Vulkan loader, opened at run time, and the instance of this process.
#pragma once

#include "capabilities.h"
#include "vulkan_api.h"

#include <vector>

namespace lapilli {

// Throws an Error for every result that is not a success: OUT_OF_MEMORY, DEVICE_LOST, or INTERNAL with the name of
// `call`.
void check(VkResult result, const char* call);

// There is one instance with and one without validation. They are made when first needed and live as long as the
// process: drivers do not like to be torn down while it ends.
class Instance {
public:
  static Instance& get(bool validation); // throws where there is no device
  static Instance* find(bool validation); // null where there is none: then the next call looks again
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  InstanceFunctions vk;
  VkInstance handle = VK_NULL_HANDLE;
  bool validation = false;
  PFN_vkGetInstanceProcAddr get_proc = nullptr;

  // Best first: discrete, integrated, virtual, other, CPU; otherwise in the loader's order.
  std::vector<Capabilities> devices;

  // By index or part of a name; empty: the environment variable LAPILLI_DEVICE, else the best one.
  uint32_t select(const char* wanted) const;

private:
  explicit Instance(bool validation);
  void prepare();
  void release();
  void enumerate();

  VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
};

// True when the environment variable LAPILLI_VALIDATION asks for validation.
bool validation_by_environment();

} // namespace lapilli
