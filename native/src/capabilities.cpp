#include "capabilities.h"

#include "describe.h"
#include "instance.h"
#include "json.h"
#include "platform.h"
#include "text.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

namespace lapilli {

namespace {

constexpr uint32_t vulkan_1_1 = VK_MAKE_API_VERSION(0, 1, 1, 0);
constexpr uint32_t vulkan_1_2 = VK_MAKE_API_VERSION(0, 1, 2, 0);
constexpr uint32_t vulkan_1_3 = VK_MAKE_API_VERSION(0, 1, 3, 0);

Extensions query_extensions(const InstanceFunctions& vk, VkPhysicalDevice device, uint32_t version) {
  // An extension that must be enabled may be among them, so a list that cannot be had is no empty one.
  constexpr const char* call = "vkEnumerateDeviceExtensionProperties";
  uint32_t count = 0;
  check(vk.EnumerateDeviceExtensionProperties(device, nullptr, &count, nullptr), call);
  std::vector<VkExtensionProperties> offered(count);
  check(vk.EnumerateDeviceExtensionProperties(device, nullptr, &count, offered.data()), call);
  offered.resize(std::min<size_t>(count, offered.size()));
  Extensions result{};
  const auto offers = [&](const char* name) {
    return std::ranges::any_of(offered, [&](const auto& item) { return std::strcmp(item.extensionName, name) == 0; });
  };
  const auto has = [&](const char* name, uint32_t core_since) {
    if (core_since != 0 && version >= core_since)
      return true;
    if (!offers(name))
      return false;
    result.names.push_back(name);
    return true;
  };
  result.storage_8bit = has(VK_KHR_8BIT_STORAGE_EXTENSION_NAME, vulkan_1_2);
  result.float16_int8 = has(VK_KHR_SHADER_FLOAT16_INT8_EXTENSION_NAME, vulkan_1_2);
  result.memory_model = has(VK_KHR_VULKAN_MEMORY_MODEL_EXTENSION_NAME, vulkan_1_2);
  result.subgroup_types = has(VK_KHR_SHADER_SUBGROUP_EXTENDED_TYPES_EXTENSION_NAME, vulkan_1_2);
  result.driver_properties = has(VK_KHR_DRIVER_PROPERTIES_EXTENSION_NAME, vulkan_1_2);
  result.float_controls = has(VK_KHR_SHADER_FLOAT_CONTROLS_EXTENSION_NAME, vulkan_1_2);
  if (result.float_controls)
    has(VK_KHR_SPIRV_1_4_EXTENSION_NAME, vulkan_1_2);
  result.subgroup_size_control = has(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME, vulkan_1_3);
  result.dot_product = has(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME, vulkan_1_3);
  result.maintenance4 = has(VK_KHR_MAINTENANCE_4_EXTENSION_NAME, vulkan_1_3);
  result.creation_feedback = has(VK_EXT_PIPELINE_CREATION_FEEDBACK_EXTENSION_NAME, vulkan_1_3);
  result.cooperative_matrix =
      vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR != nullptr && has(VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME, 0);
  result.push_descriptor = has(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME, 0);
  result.robustness2 = has(VK_KHR_ROBUSTNESS_2_EXTENSION_NAME, 0) || has(VK_EXT_ROBUSTNESS_2_EXTENSION_NAME, 0);
  has("VK_KHR_portability_subset", 0); // must be enabled where it is offered
  result.units_nv = offers(VK_NV_SHADER_SM_BUILTINS_EXTENSION_NAME);
  result.units_amd = offers(VK_AMD_SHADER_CORE_PROPERTIES_EXTENSION_NAME);
  result.units_arm = offers(VK_ARM_SHADER_CORE_BUILTINS_EXTENSION_NAME);
  return result;
}

template <class T> void link(void**& tail, T& item, VkStructureType type) {
  item.sType = type;
  item.pNext = nullptr;
  *tail = &item;
  tail = &item.pNext;
}

void link_features(const Extensions& extensions, FeatureChain& chain) {
  chain.core.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
  void** tail = &chain.core.pNext;
  link(tail, chain.storage16, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_16BIT_STORAGE_FEATURES);
  if (extensions.storage_8bit)
    link(tail, chain.storage8, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_8BIT_STORAGE_FEATURES);
  if (extensions.float16_int8)
    link(tail, chain.float16_int8, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES);
  if (extensions.memory_model)
    link(tail, chain.memory_model, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_MEMORY_MODEL_FEATURES);
  if (extensions.subgroup_size_control)
    link(tail, chain.subgroup_size, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES);
  if (extensions.subgroup_types)
    link(tail, chain.subgroup_types, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SUBGROUP_EXTENDED_TYPES_FEATURES);
  if (extensions.dot_product)
    link(tail, chain.dot_product, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES);
  if (extensions.maintenance4)
    link(tail, chain.maintenance4, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_FEATURES);
  if (extensions.cooperative_matrix)
    link(tail, chain.cooperative_matrix, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR);
  if (extensions.robustness2)
    link(tail, chain.robustness2, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ROBUSTNESS_2_FEATURES_KHR);
}

bool query_queue(const InstanceFunctions& vk, Capabilities& result) {
  uint32_t count = 0;
  vk.GetPhysicalDeviceQueueFamilyProperties(result.handle, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  vk.GetPhysicalDeviceQueueFamilyProperties(result.handle, &count, families.data());
  for (uint32_t i = 0; i < count; ++i)
    if ((families[i].queueFlags & VK_QUEUE_COMPUTE_BIT) != 0 && families[i].queueCount > 0) {
      result.queue_family = i;
      result.queue_count = families[i].queueCount;
      result.timestamp_bits = families[i].timestampValidBits;
      return true;
    }
  return false;
}

const char* component_name(VkComponentTypeKHR type) {
  switch (type) {
  case VK_COMPONENT_TYPE_FLOAT16_KHR:
    return "float16";
  case VK_COMPONENT_TYPE_FLOAT32_KHR:
    return "float32";
  case VK_COMPONENT_TYPE_FLOAT64_KHR:
    return "float64";
  case VK_COMPONENT_TYPE_SINT8_KHR:
    return "int8";
  case VK_COMPONENT_TYPE_UINT8_KHR:
    return "uint8";
  case VK_COMPONENT_TYPE_SINT32_KHR:
    return "int32";
  case VK_COMPONENT_TYPE_UINT32_KHR:
    return "uint32";
  case VK_COMPONENT_TYPE_BFLOAT16_KHR:
    return "bfloat16";
  default:
    return "other";
  }
}

// The shapes at subgroup scope; true when the one that the feature bit promises is among them.
bool query_cooperative_matrices(const InstanceFunctions& vk, Capabilities& result) {
  uint32_t count = 0;
  if (vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(result.handle, &count, nullptr) != VK_SUCCESS)
    return false;
  VkCooperativeMatrixPropertiesKHR empty{};
  empty.sType = VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR;
  std::vector<VkCooperativeMatrixPropertiesKHR> shapes(count, empty);
  vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(result.handle, &count, shapes.data());
  shapes.resize(count);
  bool found = false;
  for (const auto& shape : shapes) {
    if (shape.scope != VK_SCOPE_SUBGROUP_KHR || shape.saturatingAccumulation != 0)
      continue;
    result.cooperative_matrices.push_back(cat(component_name(shape.AType), " ", shape.MSize, "x", shape.NSize, "x",
                                              shape.KSize, " -> ", component_name(shape.ResultType)));
    found =
        found || (shape.AType == VK_COMPONENT_TYPE_FLOAT16_KHR && shape.BType == VK_COMPONENT_TYPE_FLOAT16_KHR &&
                  shape.CType == VK_COMPONENT_TYPE_FLOAT32_KHR && shape.ResultType == VK_COMPONENT_TYPE_FLOAT32_KHR &&
                  shape.MSize == 16 && shape.NSize == 16 && shape.KSize == 16);
  }
  return found;
}

void query_properties(const InstanceFunctions& vk, Capabilities& result) {
  VkPhysicalDeviceProperties2 properties{};
  properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
  VkPhysicalDeviceSubgroupProperties subgroup{};
  VkPhysicalDeviceMaintenance3Properties maintenance3{};
  VkPhysicalDeviceIDProperties id{};
  VkPhysicalDeviceDriverProperties driver{};
  VkPhysicalDeviceSubgroupSizeControlProperties size_control{};
  VkPhysicalDeviceMaintenance4Properties maintenance4{};
  void** tail = &properties.pNext;
  link(tail, subgroup, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES);
  link(tail, maintenance3, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES);
  link(tail, id, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES);
  if (result.extensions.driver_properties)
    link(tail, driver, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES);
  if (result.extensions.subgroup_size_control)
    link(tail, size_control, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES);
  if (result.extensions.maintenance4)
    link(tail, maintenance4, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES);
  VkPhysicalDeviceShaderSMBuiltinsPropertiesNV units_nv{};
  VkPhysicalDeviceShaderCorePropertiesAMD units_amd{};
  VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM units_arm{};
  if (result.extensions.units_nv)
    link(tail, units_nv, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV);
  if (result.extensions.units_amd)
    link(tail, units_amd, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_CORE_PROPERTIES_AMD);
  if (result.extensions.units_arm)
    link(tail, units_arm, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_CORE_BUILTINS_PROPERTIES_ARM);
  vk.GetPhysicalDeviceProperties2(result.handle, &properties);
  const uint32_t units_of_amd =
      units_amd.shaderEngineCount * units_amd.shaderArraysPerEngineCount * units_amd.computeUnitsPerShaderArray;
  result.compute_units = std::max({units_nv.shaderSMCount, units_of_amd, units_arm.shaderCoreCount});

  result.limits = properties.properties.limits;
  if (const auto most = environment("LAPILLI_STORAGE_RANGE")) // with it, tests bind small values as others do large ones
    result.limits.maxStorageBufferRange = static_cast<uint32_t>(
        std::min<uint64_t>(result.limits.maxStorageBufferRange, std::strtoull(most->c_str(), nullptr, 10)));
  result.driver_version = properties.properties.driverVersion;
  result.driver = result.extensions.driver_properties && driver.driverName[0] != '\0'
                      ? cat(driver.driverName, driver.driverInfo[0] != '\0' ? " " : "", driver.driverInfo)
                      : std::string("unknown");
  std::memcpy(result.cache_uuid.data(), properties.properties.pipelineCacheUUID, result.cache_uuid.size());
  std::memcpy(result.driver_uuid.data(), id.driverUUID, result.driver_uuid.size());
  result.max_allocation = maintenance3.maxMemoryAllocationSize;
  if (result.extensions.maintenance4 && maintenance4.maxBufferSize != 0)
    result.max_allocation = std::min(result.max_allocation, maintenance4.maxBufferSize);
  result.subgroup_size = result.min_subgroup_size = result.max_subgroup_size = subgroup.subgroupSize;
  if ((subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0)
    result.subgroup_operations = subgroup.supportedOperations;
  if (result.has(Feature::subgroup_size_control)) {
    if ((size_control.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0) {
      result.min_subgroup_size = size_control.minSubgroupSize;
      result.max_subgroup_size = size_control.maxSubgroupSize;
    } else {
      result.features &= ~static_cast<uint64_t>(Feature::subgroup_size_control);
    }
  }
}

void query_features(const InstanceFunctions& vk, Capabilities& result) {
  FeatureChain chain;
  link_features(result.extensions, chain);
  vk.GetPhysicalDeviceFeatures2(result.handle, &chain.core);
  const auto add = [&](Feature feature, VkBool32 present) {
    if (present != 0)
      result.features |= static_cast<uint64_t>(feature);
  };
  const VkPhysicalDeviceFeatures& core = chain.core.features;
  add(Feature::storage_16bit, chain.storage16.storageBuffer16BitAccess);
  add(Feature::storage_8bit, chain.storage8.storageBuffer8BitAccess);
  add(Feature::float16, chain.float16_int8.shaderFloat16);
  add(Feature::int8, chain.float16_int8.shaderInt8);
  add(Feature::int16, core.shaderInt16);
  add(Feature::int64, core.shaderInt64);
  add(Feature::float64, core.shaderFloat64);
  add(Feature::subgroup_size_control, chain.subgroup_size.subgroupSizeControl);
  add(Feature::integer_dot_product, chain.dot_product.shaderIntegerDotProduct);
  add(Feature::vulkan_memory_model, chain.memory_model.vulkanMemoryModel);
  if (chain.cooperative_matrix.cooperativeMatrix != 0)
    add(Feature::cooperative_matrix, query_cooperative_matrices(vk, result) ? 1 : 0);
  result.uniform_storage_16bit = chain.storage16.uniformAndStorageBuffer16BitAccess != 0;
  result.uniform_storage_8bit = chain.storage8.uniformAndStorageBuffer8BitAccess != 0;
  result.full_subgroups = chain.subgroup_size.computeFullSubgroups != 0;
}

} // namespace

uint64_t Capabilities::device_memory() const {
  uint64_t largest = 0;
  for (uint32_t i = 0; i < memory.memoryHeapCount; ++i)
    if ((memory.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) != 0)
      largest = std::max(largest, memory.memoryHeaps[i].size);
  return largest;
}

uint64_t Capabilities::all_memory() const {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < memory.memoryHeapCount; ++i)
    sum += memory.memoryHeaps[i].size;
  return sum;
}

std::optional<Capabilities> query_capabilities(const InstanceFunctions& vk, VkPhysicalDevice device) {
  VkPhysicalDeviceProperties properties{};
  vk.GetPhysicalDeviceProperties(device, &properties);
  if (properties.apiVersion < vulkan_1_1)
    return std::nullopt;
  Capabilities result;
  result.handle = device;
  result.name = properties.deviceName;
  result.type = properties.deviceType;
  result.vendor_id = properties.vendorID;
  result.device_id = properties.deviceID;
  result.api_version = std::min(properties.apiVersion, VK_MAKE_API_VERSION(0, 1, 3, 0xfff));
  result.extensions = query_extensions(vk, device, result.api_version);
  query_features(vk, result);
  query_properties(vk, result);
  // What is divided by: no driver may end the process.
  for (VkDeviceSize* alignment :
       {&result.limits.minStorageBufferOffsetAlignment, &result.limits.minTexelBufferOffsetAlignment})
    *alignment = std::bit_ceil(std::max<VkDeviceSize>(*alignment, 1));
  if (result.extensions.float_controls)
    result.float_controls = query_float_controls(vk, device);
  vk.GetPhysicalDeviceMemoryProperties(device, &result.memory);
  if (!query_queue(vk, result))
    return std::nullopt;
  return result;
}

void wanted_features(const InstanceFunctions& vk, const Capabilities& device, FeatureChain& chain) {
  link_features(device.extensions, chain);
  vk.GetPhysicalDeviceFeatures2(device.handle, &chain.core);
  const VkPhysicalDeviceFeatures offered = chain.core.features;
  VkPhysicalDeviceFeatures& core = chain.core.features;
  core = {};
  // A wrong index reads zero, and writes nothing; with the first feature alone it may reach a neighbour in the same memory.
  core.robustBufferAccess = offered.robustBufferAccess;
  chain.robustness2.robustBufferAccess2 &= offered.robustBufferAccess;
  chain.robustness2.nullDescriptor = 0;
  core.shaderInt16 = offered.shaderInt16;
  core.shaderInt64 = offered.shaderInt64;
  core.shaderFloat64 = offered.shaderFloat64;
  chain.storage16.storagePushConstant16 = 0;
  chain.storage16.storageInputOutput16 = 0;
  chain.storage8.storagePushConstant8 = 0;
  chain.memory_model.vulkanMemoryModelAvailabilityVisibilityChains = 0;
  chain.cooperative_matrix.cooperativeMatrixRobustBufferAccess = 0;
}

void describe(const Capabilities& device, uint32_t index, Json& json) {
  constexpr std::array types{"other", "integrated", "discrete", "virtual", "cpu"};
  const auto type = static_cast<size_t>(device.type);
  json.object([&] {
    json.field("index", index);
    json.field("name", device.name);
    json.field("type", types[type < types.size() ? type : 0]);
    json.field("vendor_id", device.vendor_id);
    json.field("device_id", device.device_id);
    json.field("driver", device.driver);
    json.field("driver_version", device.driver_version);
    json.field("api_version",
               cat(VK_API_VERSION_MAJOR(device.api_version), ".", VK_API_VERSION_MINOR(device.api_version), ".",
                   VK_API_VERSION_PATCH(device.api_version)));
    json.field("memory", device.device_memory());
    json.key("limits");
    json.object([&] {
      const VkPhysicalDeviceLimits& limits = device.limits;
      json.field("max_workgroup_invocations", limits.maxComputeWorkGroupInvocations);
      json.list("max_workgroup_size", limits.maxComputeWorkGroupSize);
      json.list("max_workgroup_count", limits.maxComputeWorkGroupCount);
      json.field("shared_memory", limits.maxComputeSharedMemorySize);
      json.field("push_constants", limits.maxPushConstantsSize);
      json.field("storage_buffers", limits.maxPerStageDescriptorStorageBuffers);
      json.field("storage_buffer_range", limits.maxStorageBufferRange);
      json.field("storage_buffer_offset_alignment", limits.minStorageBufferOffsetAlignment);
      json.field("texel_elements", limits.maxTexelBufferElements);
      json.field("texel_offset_alignment", limits.minTexelBufferOffsetAlignment);
      json.field("allocation", device.max_allocation);
      json.field("subgroup_size", device.subgroup_size);
      json.field("min_subgroup_size", device.min_subgroup_size);
      json.field("max_subgroup_size", device.max_subgroup_size);
      json.field("subgroup_operations", device.subgroup_operations);
      json.field("compute_units", device.compute_units);
      json.field("timestamp_period", static_cast<double>(limits.timestampPeriod));
      json.field("timestamp_bits", device.timestamp_bits);
      json.field("queues", device.queue_count);
    });
    json.key("features");
    json.object([&] {
      uint64_t all = 0;
      for (const Feature feature : schema::EnumValuesFeature())
        all |= static_cast<uint64_t>(feature);
      for (uint32_t bit = 0; bit < 64; ++bit)
        if (const uint64_t flag = uint64_t{1} << bit; (all & flag) != 0)
          json.field(feature_names(flag).front(), (device.features & flag) != 0);
    });
    json.list("cooperative_matrices", device.cooperative_matrices);
    json.key("float_controls");
    json.object([&] {
      json.field("nan_and_infinity", device.float_controls.special_32);
      json.field("nan_and_infinity_16bit", device.float_controls.special_16);
      json.field("denormals", device.float_controls.denormal_32);
      json.field("denormals_16bit", device.float_controls.denormal_16);
    });
  });
}

} // namespace lapilli
