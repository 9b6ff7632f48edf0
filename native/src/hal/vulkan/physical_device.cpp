#include "hal/vulkan/physical_device.h"

#include "base/error.h"
#include "base/platform.h"
#include "base/text.h"
#include "hal/known_faults.h"
#include "hal/vulkan/check.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

namespace lapilli::vulkan {

namespace {

constexpr uint32_t vulkan_1_1 = VK_MAKE_API_VERSION(0, 1, 1, 0);
constexpr uint32_t vulkan_1_2 = VK_MAKE_API_VERSION(0, 1, 2, 0);
constexpr uint32_t vulkan_1_3 = VK_MAKE_API_VERSION(0, 1, 3, 0);

Extensions query_extensions(const InstanceFunctions& vk, VkPhysicalDevice device, uint32_t version,
                            const TurnedOn* on) {
  // An extension that must be enabled may be among them, so a list that cannot be had is no empty one.
  constexpr const char* call = "vkEnumerateDeviceExtensionProperties";
  uint32_t count = 0;
  check(vk.EnumerateDeviceExtensionProperties(device, nullptr, &count, nullptr), call);
  std::vector<VkExtensionProperties> offered(count);
  check(vk.EnumerateDeviceExtensionProperties(device, nullptr, &count, offered.data()), call);
  offered.resize(std::min<size_t>(count, offered.size()));
  Extensions result{};
  const auto offers = [&](const char* name) {
    const auto is_it = [&](const char* other) { return std::strcmp(name, other) == 0; };
    if (on != nullptr && std::ranges::none_of(on->extensions, is_it))
      return false;
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
  result.bfloat16 = result.cooperative_matrix && has(VK_KHR_SHADER_BFLOAT16_EXTENSION_NAME, 0);
  result.push_descriptor = has(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME, 0);
  result.robustness2 = has(VK_KHR_ROBUSTNESS_2_EXTENSION_NAME, 0) || has(VK_EXT_ROBUSTNESS_2_EXTENSION_NAME, 0);
  result.external_host = has(VK_EXT_EXTERNAL_MEMORY_HOST_EXTENSION_NAME, 0);
  result.external_fd = has(VK_KHR_EXTERNAL_MEMORY_FD_EXTENSION_NAME, 0);
  result.external_dma_buf = result.external_fd && has(VK_EXT_EXTERNAL_MEMORY_DMA_BUF_EXTENSION_NAME, 0);
  result.external_hardware_buffer = has(VK_EXT_QUEUE_FAMILY_FOREIGN_EXTENSION_NAME, 0) &&
                                    has(VK_ANDROID_EXTERNAL_MEMORY_ANDROID_HARDWARE_BUFFER_EXTENSION_NAME, 0);
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
  if (extensions.bfloat16)
    link(tail, chain.bfloat16, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR);
  if (extensions.robustness2)
    link(tail, chain.robustness2, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ROBUSTNESS_2_FEATURES_KHR);
}

bool query_queue(const InstanceFunctions& vk, PhysicalDevice& result, const TurnedOn* on) {
  uint32_t count = 0;
  vk.GetPhysicalDeviceQueueFamilyProperties(result.handle, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  vk.GetPhysicalDeviceQueueFamilyProperties(result.handle, &count, families.data());
  for (uint32_t i = 0; i < count; ++i)
    if ((on == nullptr || i == on->queue_family) && (families[i].queueFlags & VK_QUEUE_COMPUTE_BIT) != 0 &&
        families[i].queueCount > 0) {
      result.queue_family = i;
      result.capabilities.queue_count = families[i].queueCount;
      result.capabilities.timestamp_bits = families[i].timestampValidBits;
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

// The feature that a shape at subgroup scope stands for, or 0.
uint64_t feature_of(const VkCooperativeMatrixPropertiesKHR& shape) {
  const auto is = [&](VkComponentTypeKHR factor, VkComponentTypeKHR sum, uint32_t depth) {
    return shape.AType == factor && shape.BType == factor && shape.CType == sum && shape.ResultType == sum &&
           shape.MSize == 16 && shape.NSize == 16 && shape.KSize == depth;
  };
  if (is(VK_COMPONENT_TYPE_FLOAT16_KHR, VK_COMPONENT_TYPE_FLOAT32_KHR, 16))
    return static_cast<uint64_t>(Feature::cooperative_matrix);
  if (is(VK_COMPONENT_TYPE_BFLOAT16_KHR, VK_COMPONENT_TYPE_FLOAT32_KHR, 16))
    return static_cast<uint64_t>(Feature::bfloat16_matrix);
  if (is(VK_COMPONENT_TYPE_SINT8_KHR, VK_COMPONENT_TYPE_SINT32_KHR, 32))
    return static_cast<uint64_t>(Feature::int8_matrix);
  return 0;
}

// The shapes at subgroup scope. Returns the features whose shape is among them.
uint64_t query_cooperative_matrices(const InstanceFunctions& vk, PhysicalDevice& result) {
  uint32_t count = 0;
  if (vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(result.handle, &count, nullptr) != VK_SUCCESS)
    return 0;
  VkCooperativeMatrixPropertiesKHR empty{};
  empty.sType = VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR;
  std::vector<VkCooperativeMatrixPropertiesKHR> shapes(count, empty);
  vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(result.handle, &count, shapes.data());
  shapes.resize(count);
  uint64_t found = 0;
  for (const auto& shape : shapes) {
    if (shape.scope != VK_SCOPE_SUBGROUP_KHR || shape.saturatingAccumulation != 0)
      continue;
    result.capabilities.cooperative_matrices.push_back(cat(component_name(shape.AType), " ", shape.MSize, "x",
                                                           shape.NSize, "x", shape.KSize, " -> ",
                                                           component_name(shape.ResultType)));
    found |= feature_of(shape);
  }
  return found;
}

uint32_t operations_of(VkSubgroupFeatureFlags flags) {
  using schema::SubgroupOperation;
  constexpr std::pair<VkSubgroupFeatureFlags, SubgroupOperation> all[] = {
      {VK_SUBGROUP_FEATURE_BASIC_BIT, SubgroupOperation::basic},
      {VK_SUBGROUP_FEATURE_VOTE_BIT, SubgroupOperation::vote},
      {VK_SUBGROUP_FEATURE_ARITHMETIC_BIT, SubgroupOperation::arithmetic},
      {VK_SUBGROUP_FEATURE_BALLOT_BIT, SubgroupOperation::ballot},
      {VK_SUBGROUP_FEATURE_SHUFFLE_BIT, SubgroupOperation::shuffle},
      {VK_SUBGROUP_FEATURE_SHUFFLE_RELATIVE_BIT, SubgroupOperation::shuffle_relative},
      {VK_SUBGROUP_FEATURE_CLUSTERED_BIT, SubgroupOperation::clustered},
      {VK_SUBGROUP_FEATURE_QUAD_BIT, SubgroupOperation::quad},
  };
  uint32_t result = 0;
  for (const auto& [flag, operation] : all)
    if ((flags & flag) != 0)
      result |= static_cast<uint32_t>(operation);
  return result;
}

void set_limits(const VkPhysicalDeviceLimits& from, hal::Capabilities& to) {
  hal::DeviceLimits& limits = to.limits;
  limits.max_workgroup_invocations = from.maxComputeWorkGroupInvocations;
  std::ranges::copy(from.maxComputeWorkGroupSize, limits.max_workgroup_size.begin());
  std::ranges::copy(from.maxComputeWorkGroupCount, limits.max_workgroup_count.begin());
  limits.shared_memory = from.maxComputeSharedMemorySize;
  limits.push_constants = from.maxPushConstantsSize;
  limits.storage_buffers = from.maxPerStageDescriptorStorageBuffers;
  limits.texel_buffers = from.maxPerStageDescriptorSampledImages;
  limits.storage_range = from.maxStorageBufferRange;
  if (const auto most =
          environment("LAPILLI_STORAGE_RANGE")) // with it, tests bind small values as others do large ones
    limits.storage_range = std::min<uint64_t>(limits.storage_range, std::strtoull(most->c_str(), nullptr, 10));
  limits.texel_elements = from.maxTexelBufferElements;
  // What is divided by: no driver may end the process.
  limits.storage_alignment = std::bit_ceil(std::max<uint64_t>(from.minStorageBufferOffsetAlignment, 1));
  limits.texel_alignment = std::bit_ceil(std::max<uint64_t>(from.minTexelBufferOffsetAlignment, 1));
  to.timestamp_period = static_cast<double>(from.timestampPeriod);
}

void query_properties(const InstanceFunctions& vk, PhysicalDevice& result) {
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
  VkPhysicalDeviceShaderIntegerDotProductProperties dot_product{};
  if (result.extensions.dot_product)
    link(tail, dot_product, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_PROPERTIES);
  VkPhysicalDeviceShaderSMBuiltinsPropertiesNV units_nv{};
  VkPhysicalDeviceShaderCorePropertiesAMD units_amd{};
  VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM units_arm{};
  VkPhysicalDeviceExternalMemoryHostPropertiesEXT host_memory{};
  if (result.extensions.external_host)
    link(tail, host_memory, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_EXTERNAL_MEMORY_HOST_PROPERTIES_EXT);
  if (result.extensions.units_nv)
    link(tail, units_nv, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV);
  if (result.extensions.units_amd)
    link(tail, units_amd, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_CORE_PROPERTIES_AMD);
  if (result.extensions.units_arm)
    link(tail, units_arm, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_CORE_BUILTINS_PROPERTIES_ARM);
  vk.GetPhysicalDeviceProperties2(result.handle, &properties);
  const uint32_t units_of_amd =
      units_amd.shaderEngineCount * units_amd.shaderArraysPerEngineCount * units_amd.computeUnitsPerShaderArray;
  hal::Capabilities& to = result.capabilities;
  if (to.has(Feature::integer_dot_product) && dot_product.integerDotProduct4x8BitPackedSignedAccelerated != 0)
    to.features |= static_cast<uint64_t>(Feature::packed_dot_product);
  to.compute_units = std::max({units_nv.shaderSMCount, units_of_amd, units_arm.shaderCoreCount});

  set_limits(properties.properties.limits, to);
  to.host_alignment = host_memory.minImportedHostPointerAlignment;
  std::memcpy(to.uuid.data(), id.deviceUUID, to.uuid.size());
  to.driver_version = properties.properties.driverVersion;
  to.driver = result.extensions.driver_properties && driver.driverName[0] != '\0'
                  ? cat(driver.driverName, driver.driverInfo[0] != '\0' ? " " : "", driver.driverInfo)
                  : std::string("unknown");
  std::memcpy(result.cache_uuid.data(), properties.properties.pipelineCacheUUID, result.cache_uuid.size());
  std::memcpy(result.driver_uuid.data(), id.driverUUID, result.driver_uuid.size());
  to.max_allocation = maintenance3.maxMemoryAllocationSize;
  if (result.extensions.maintenance4 && maintenance4.maxBufferSize != 0)
    to.max_allocation = std::min(to.max_allocation, maintenance4.maxBufferSize);
  to.subgroup_size = to.min_subgroup_size = to.max_subgroup_size = subgroup.subgroupSize;
  if ((subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0)
    to.subgroup_operations = operations_of(subgroup.supportedOperations);
  if (to.has(Feature::subgroup_size_control)) {
    if ((size_control.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0) {
      to.min_subgroup_size = size_control.minSubgroupSize;
      to.max_subgroup_size = size_control.maxSubgroupSize;
    } else {
      to.features &= ~static_cast<uint64_t>(Feature::subgroup_size_control);
    }
  }
}

// Leaves of a chain what another one turned on, whichever structures that says it by.
void restrict_to(FeatureChain& chain, const VkPhysicalDeviceFeatures2* on) {
  VkPhysicalDeviceFeatures2 core{};
  VkPhysicalDevice16BitStorageFeatures storage16{};
  VkPhysicalDevice8BitStorageFeatures storage8{};
  VkPhysicalDeviceShaderFloat16Int8Features float16_int8{};
  VkPhysicalDeviceVulkanMemoryModelFeatures memory_model{};
  VkPhysicalDeviceSubgroupSizeControlFeatures subgroup_size{};
  VkPhysicalDeviceShaderIntegerDotProductFeatures dot_product{};
  VkPhysicalDeviceCooperativeMatrixFeaturesKHR cooperative_matrix{};
  for (const auto* item = reinterpret_cast<const VkBaseInStructure*>(on); item != nullptr; item = item->pNext)
    switch (item->sType) {
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2:
      core.features = reinterpret_cast<const VkPhysicalDeviceFeatures2*>(item)->features;
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_16BIT_STORAGE_FEATURES:
      storage16 = *reinterpret_cast<const VkPhysicalDevice16BitStorageFeatures*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_8BIT_STORAGE_FEATURES:
      storage8 = *reinterpret_cast<const VkPhysicalDevice8BitStorageFeatures*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES:
      float16_int8 = *reinterpret_cast<const VkPhysicalDeviceShaderFloat16Int8Features*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_MEMORY_MODEL_FEATURES:
      memory_model = *reinterpret_cast<const VkPhysicalDeviceVulkanMemoryModelFeatures*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES:
      subgroup_size = *reinterpret_cast<const VkPhysicalDeviceSubgroupSizeControlFeatures*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES:
      dot_product = *reinterpret_cast<const VkPhysicalDeviceShaderIntegerDotProductFeatures*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR:
      cooperative_matrix = *reinterpret_cast<const VkPhysicalDeviceCooperativeMatrixFeaturesKHR*>(item);
      break;
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES: {
      const auto& all = *reinterpret_cast<const VkPhysicalDeviceVulkan11Features*>(item);
      storage16.storageBuffer16BitAccess = all.storageBuffer16BitAccess;
      storage16.uniformAndStorageBuffer16BitAccess = all.uniformAndStorageBuffer16BitAccess;
      break;
    }
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES: {
      const auto& all = *reinterpret_cast<const VkPhysicalDeviceVulkan12Features*>(item);
      storage8.storageBuffer8BitAccess = all.storageBuffer8BitAccess;
      storage8.uniformAndStorageBuffer8BitAccess = all.uniformAndStorageBuffer8BitAccess;
      float16_int8.shaderFloat16 = all.shaderFloat16;
      float16_int8.shaderInt8 = all.shaderInt8;
      memory_model.vulkanMemoryModel = all.vulkanMemoryModel;
      break;
    }
    case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES: {
      const auto& all = *reinterpret_cast<const VkPhysicalDeviceVulkan13Features*>(item);
      subgroup_size.subgroupSizeControl = all.subgroupSizeControl;
      subgroup_size.computeFullSubgroups = all.computeFullSubgroups;
      dot_product.shaderIntegerDotProduct = all.shaderIntegerDotProduct;
      break;
    }
    default:
      break;
    }
  const auto both = [](VkBool32& there, VkBool32 wanted) { there = there != 0 && wanted != 0 ? 1 : 0; };
  both(chain.core.features.robustBufferAccess, core.features.robustBufferAccess);
  both(chain.core.features.shaderInt16, core.features.shaderInt16);
  both(chain.core.features.shaderInt64, core.features.shaderInt64);
  both(chain.core.features.shaderFloat64, core.features.shaderFloat64);
  both(chain.storage16.storageBuffer16BitAccess, storage16.storageBuffer16BitAccess);
  both(chain.storage16.uniformAndStorageBuffer16BitAccess, storage16.uniformAndStorageBuffer16BitAccess);
  both(chain.storage8.storageBuffer8BitAccess, storage8.storageBuffer8BitAccess);
  both(chain.storage8.uniformAndStorageBuffer8BitAccess, storage8.uniformAndStorageBuffer8BitAccess);
  both(chain.float16_int8.shaderFloat16, float16_int8.shaderFloat16);
  both(chain.float16_int8.shaderInt8, float16_int8.shaderInt8);
  both(chain.memory_model.vulkanMemoryModel, memory_model.vulkanMemoryModel);
  both(chain.subgroup_size.subgroupSizeControl, subgroup_size.subgroupSizeControl);
  both(chain.subgroup_size.computeFullSubgroups, subgroup_size.computeFullSubgroups);
  both(chain.dot_product.shaderIntegerDotProduct, dot_product.shaderIntegerDotProduct);
  both(chain.cooperative_matrix.cooperativeMatrix, cooperative_matrix.cooperativeMatrix);
}

void query_features(const InstanceFunctions& vk, PhysicalDevice& result, const TurnedOn* on) {
  FeatureChain chain;
  link_features(result.extensions, chain);
  vk.GetPhysicalDeviceFeatures2(result.handle, &chain.core);
  if (on != nullptr) {
    restrict_to(chain, on->features);
    if (chain.core.features.robustBufferAccess == 0)
      fail(LAPILLI_INVALID_ARGUMENT,
           "The device was made without robustBufferAccess, which keeps kernels within their "
           "buffers. Turn it on in the features of vkCreateDevice, and give these to the player.");
  }
  const auto add = [&](Feature feature, VkBool32 present) {
    if (present != 0)
      result.capabilities.features |= static_cast<uint64_t>(feature);
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
  add(Feature::memory_model, chain.memory_model.vulkanMemoryModel);
  if (chain.cooperative_matrix.cooperativeMatrix != 0) {
    const uint64_t shapes = query_cooperative_matrices(vk, result);
    const VkBool32 bfloat16 = chain.bfloat16.shaderBFloat16Type & chain.bfloat16.shaderBFloat16CooperativeMatrix;
    add(Feature::cooperative_matrix, (shapes & static_cast<uint64_t>(Feature::cooperative_matrix)) != 0 ? 1 : 0);
    add(Feature::bfloat16_matrix, (shapes & static_cast<uint64_t>(Feature::bfloat16_matrix)) != 0 ? bfloat16 : 0);
    add(Feature::int8_matrix, (shapes & static_cast<uint64_t>(Feature::int8_matrix)) != 0 ? 1 : 0);
  }
  result.capabilities.uniform_storage_16bit = chain.storage16.uniformAndStorageBuffer16BitAccess != 0;
  result.capabilities.uniform_storage_8bit = chain.storage8.uniformAndStorageBuffer8BitAccess != 0;
  result.full_subgroups = chain.subgroup_size.computeFullSubgroups != 0;
}

FloatControls query_float_controls(const InstanceFunctions& vk, VkPhysicalDevice device) {
  VkPhysicalDeviceFloatControlsProperties controls{};
  controls.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FLOAT_CONTROLS_PROPERTIES;
  VkPhysicalDeviceProperties2 properties{};
  properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
  properties.pNext = &controls;
  vk.GetPhysicalDeviceProperties2(device, &properties);
  FloatControls result;
  result.special_32 = controls.shaderSignedZeroInfNanPreserveFloat32 != 0;
  result.special_16 = controls.shaderSignedZeroInfNanPreserveFloat16 != 0;
  result.denormal_32 = controls.shaderDenormPreserveFloat32 != 0;
  result.denormal_16 = controls.shaderDenormPreserveFloat16 != 0;
  result.together = controls.denormBehaviorIndependence == VK_SHADER_FLOAT_CONTROLS_INDEPENDENCE_NONE;
  return result;
}

void query_memory(const InstanceFunctions& vk, PhysicalDevice& result) {
  vk.GetPhysicalDeviceMemoryProperties(result.handle, &result.memory);
  const VkPhysicalDeviceMemoryProperties& memory = result.memory;
  hal::Capabilities& to = result.capabilities;
  for (uint32_t i = 0; i < memory.memoryHeapCount; ++i) {
    const VkMemoryHeap& heap = memory.memoryHeaps[i];
    to.all_memory += heap.size;
    if ((heap.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) != 0)
      to.device_memory = std::max(to.device_memory, heap.size);
  }
  constexpr uint64_t small_window = uint64_t{256} << 20;
  constexpr VkMemoryPropertyFlags wanted =
      VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT | VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  for (uint32_t i = 0; i < memory.memoryTypeCount; ++i)
    if (const VkMemoryType& type = memory.memoryTypes[i]; (type.propertyFlags & wanted) == wanted)
      to.large_bar = to.large_bar || memory.memoryHeaps[type.heapIndex].size > small_window;
}

hal::DeviceType type_of(VkPhysicalDeviceType type) {
  switch (type) {
  case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
    return hal::DeviceType::integrated;
  case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
    return hal::DeviceType::discrete;
  case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
    return hal::DeviceType::virtual_gpu;
  case VK_PHYSICAL_DEVICE_TYPE_CPU:
    return hal::DeviceType::cpu;
  default:
    return hal::DeviceType::other;
  }
}

// The newest SPIR-V that a version of Vulkan takes: 1.x.
uint32_t spirv_minor(uint32_t version) { return version >= vulkan_1_3 ? 6 : version >= vulkan_1_2 ? 5 : 3; }

std::optional<PhysicalDevice> query(const InstanceFunctions& vk, VkPhysicalDevice device, const TurnedOn* on) {
  VkPhysicalDeviceProperties properties{};
  vk.GetPhysicalDeviceProperties(device, &properties);
  if (on != nullptr)
    properties.apiVersion = std::min(properties.apiVersion, on->api_version);
  if (properties.apiVersion < vulkan_1_1)
    return std::nullopt;
  PhysicalDevice result;
  result.handle = device;
  hal::Capabilities& capabilities = result.capabilities;
  capabilities.name = properties.deviceName;
  capabilities.type = type_of(properties.deviceType);
  capabilities.vendor_id = properties.vendorID;
  capabilities.device_id = properties.deviceID;
  const uint32_t version = std::min(properties.apiVersion, VK_MAKE_API_VERSION(0, 1, 3, 0xfff));
  capabilities.api = "Vulkan";
  capabilities.api_version =
      cat(VK_API_VERSION_MAJOR(version), ".", VK_API_VERSION_MINOR(version), ".", VK_API_VERSION_PATCH(version));
  capabilities.spirv_minor = spirv_minor(version);
  result.extensions = query_extensions(vk, device, version, on);
  query_features(vk, result, on);
  query_properties(vk, result);
  if (result.extensions.float_controls)
    capabilities.float_controls = query_float_controls(vk, device);
  query_memory(vk, result);
  if (!query_queue(vk, result, on))
    return std::nullopt;
  hal::withhold_known_faults(capabilities);
  return result;
}

} // namespace

std::optional<PhysicalDevice> query_device(const InstanceFunctions& vk, VkPhysicalDevice device) {
  return query(vk, device, nullptr);
}

PhysicalDevice query_taken(const InstanceFunctions& vk, VkPhysicalDevice device, const TurnedOn& on) {
  if (auto found = query(vk, device, &on)) {
    found->capabilities.queue_count = 1;
    return *std::move(found);
  }
  fail(LAPILLI_INVALID_ARGUMENT,
       "The application's device cannot run Lapilli: its instance and device must be of Vulkan 1.1 "
       "or newer, and queue family ",
       on.queue_family, " must compute.");
}

void wanted_features(const InstanceFunctions& vk, const PhysicalDevice& device, FeatureChain& chain) {
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
  chain.bfloat16.shaderBFloat16DotProduct = 0;
}

} // namespace lapilli::vulkan
