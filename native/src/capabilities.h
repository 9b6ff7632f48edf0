// What a physical device can do, in the terms of a plan's requirements.
#pragma once

#include "expr.h"
#include "float_controls.h"
#include "vulkan_api.h"

#include <optional>

namespace lapilli {

class Json;

// Extensions that the player uses where a device has them, or has them in its Vulkan version.
struct Extensions {
  bool storage_8bit, float16_int8, memory_model, subgroup_types, subgroup_size_control, dot_product, maintenance4;
  bool cooperative_matrix, creation_feedback, driver_properties, push_descriptor, robustness2, float_controls;
  bool units_nv, units_amd, units_arm; // that say how many compute units there are
  std::vector<const char*> names; // to enable on a device: those that are not in its version
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
  VkPhysicalDeviceRobustness2FeaturesKHR robustness2{};
};

struct Capabilities {
  VkPhysicalDevice handle = VK_NULL_HANDLE;
  std::string name;
  VkPhysicalDeviceType type{};
  uint32_t vendor_id = 0;
  uint32_t device_id = 0;
  uint32_t api_version = 0;    // the lower one of the instance's and the device's
  uint32_t driver_version = 0; // as the driver encodes it
  std::string driver;          // name and version for people
  std::array<uint8_t, 16> cache_uuid{};
  std::array<uint8_t, 16> driver_uuid{};
  VkPhysicalDeviceLimits limits{};
  VkPhysicalDeviceMemoryProperties memory{};
  uint64_t max_allocation = 0; // bytes of one memory object and of one buffer
  uint32_t subgroup_size = 0, min_subgroup_size = 0, max_subgroup_size = 0;
  uint32_t subgroup_operations = 0; // VkSubgroupFeatureFlagBits of compute shaders
  uint32_t compute_units = 0;       // multiprocessors, compute units, shader cores; 0: the driver does not say
  uint64_t features = 0;            // Feature bits
  bool uniform_storage_16bit = false, uniform_storage_8bit = false;
  bool full_subgroups = false;
  std::vector<std::string> cooperative_matrices; // "float16 16x16x16 -> float32"
  Extensions extensions{};
  FloatControls float_controls;
  uint32_t queue_family = 0, queue_count = 0;
  uint32_t timestamp_bits = 0;

  bool has(Feature feature) const { return (features & static_cast<uint64_t>(feature)) != 0; }
  bool is_cpu() const { return type == VK_PHYSICAL_DEVICE_TYPE_CPU; }
  bool is_discrete() const { return type == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU; }
  uint64_t device_memory() const; // bytes of the largest device-local heap
  uint64_t all_memory() const;    // bytes of all heaps
};

// Nothing for a device that cannot run Lapilli at all: Vulkan 1.0, or no compute queue.
std::optional<Capabilities> query_capabilities(const InstanceFunctions& vk, VkPhysicalDevice device);

// Links the structures of `chain` that the device knows, and sets in them what the player turns on.
void wanted_features(const InstanceFunctions& vk, const Capabilities& device, FeatureChain& chain);

// Why the device cannot run this plan of a method, in words; empty when it can.
// `values`: of the method's expressions where they are not `dynamic`.
std::vector<std::string> missing(const Capabilities& device, const Plan& plan, std::span<const Kernel> kernels,
                                 const Values& values, const std::vector<bool>& dynamic);

void describe(const Capabilities& device, uint32_t index, Json& json);

} // namespace lapilli
