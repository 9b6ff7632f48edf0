// What Vulkan says of a physical device.
#pragma once

#include "hal/capabilities.h"
#include "vulkan_api.h"

#include <optional>
#include <span>

namespace lapilli::vulkan {

// Extensions that the player uses where a device has them, or has them in its Vulkan version.
struct Extensions {
  bool storage_8bit, float16_int8, memory_model, subgroup_types, subgroup_size_control, dot_product, maintenance4;
  bool cooperative_matrix, bfloat16, external_host, external_fd, external_dma_buf, external_hardware_buffer,
      creation_feedback, driver_properties, push_descriptor, robustness2, float_controls;
  bool units_nv, units_amd, units_arm; // that say how many compute units there are
  std::vector<const char*> names;      // to enable on a device: those that are not in its version
};

// The feature structures that the player knows, linked as far as a device knows them.
struct FeatureChain {
  VkPhysicalDeviceFeatures2 core{};
  VkPhysicalDevice16BitStorageFeatures storage16{};
  VkPhysicalDevice8BitStorageFeatures storage8{};
  VkPhysicalDeviceShaderFloat16Int8Features float16_int8{};
  VkPhysicalDeviceVulkanMemoryModelFeatures memory_model{};
  VkPhysicalDeviceSubgroupSizeControlFeatures subgroup_size{};
  VkPhysicalDeviceShaderSubgroupExtendedTypesFeatures subgroup_types{};
  VkPhysicalDeviceShaderIntegerDotProductFeatures dot_product{};
  VkPhysicalDeviceMaintenance4Features maintenance4{};
  VkPhysicalDeviceCooperativeMatrixFeaturesKHR cooperative_matrix{};
  VkPhysicalDeviceShaderBfloat16FeaturesKHR bfloat16{};
  VkPhysicalDeviceRobustness2FeaturesKHR robustness2{};
};

struct PhysicalDevice {
  VkPhysicalDevice handle = VK_NULL_HANDLE;
  hal::Capabilities capabilities;
  std::array<uint8_t, 16> cache_uuid{};
  std::array<uint8_t, 16> driver_uuid{};
  VkPhysicalDeviceMemoryProperties memory{};
  bool full_subgroups = false;
  Extensions extensions{};
  uint32_t queue_family = 0;
};

// What an application turned on, of a device that it made.
struct TurnedOn {
  uint32_t api_version;
  uint32_t queue_family;
  std::span<const char* const> extensions;
  const VkPhysicalDeviceFeatures2* features; // null: none
};

// The same for a device that was made already: of what it can do, what was turned on. Throws INVALID_ARGUMENT where that is too little.
PhysicalDevice query_taken(const InstanceFunctions& vk, VkPhysicalDevice device, const TurnedOn& on);

// Nothing for a device that cannot run Lapilli at all: Vulkan 1.0, or no compute queue.
std::optional<PhysicalDevice> query_device(const InstanceFunctions& vk, VkPhysicalDevice device);

// Links the structures of `chain` that the device knows, and sets in them what the player turns on.
void wanted_features(const InstanceFunctions& vk, const PhysicalDevice& device, FeatureChain& chain);

} // namespace lapilli::vulkan
