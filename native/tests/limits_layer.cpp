// A Vulkan layer, for tests: the device below it looks like a poorer one. It says so and no more: that the player keeps to it is what
// the validation layer sees, which must be above this one. It can also be a wrong driver, by changing kernels.
//
// LAPILLI_TEST_LIMITS has words: `name=value` for a number of the device, `-name` for what it lacks, `+name` for an extension that every
// application must enable, as the portability subset. tests/support/phones.py writes them.

#include "vulkan_api.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace lapilli;

// The loader's interface for layers, as its documentation describes it.
struct Link {
  Link* next;
  PFN_vkGetInstanceProcAddr get_instance;
  void* get_other; // of an instance: functions of physical devices; of a device: vkGetDeviceProcAddr
};
struct CreateInfo {
  VkStructureType type;
  const void* next;
  int function; // 0: link
  Link* link;
};
struct Negotiation { // of the device: vkGetDeviceProcAddr
  int type;
  void* next;
  uint32_t version;
  PFN_vkGetInstanceProcAddr get_instance;
  PFN_vkGetDeviceProcAddr get_device;
  void* get_physical_device;
};

// What LAPILLI_TEST_LIMITS says.
class Limits {
public:
  Limits() {
    const char* text = std::getenv("LAPILLI_TEST_LIMITS");
    std::istringstream words(text == nullptr ? "" : text);
    for (std::string word; words >> word;) {
      const size_t sign = word.find('=');
      if (word.front() == '-')
        lacks_.push_back(word.substr(1));
      else if (word.front() == '+')
        demands_.push_back(word.substr(1));
      else if (sign != std::string::npos)
        values_[word.substr(0, sign)] = word.substr(sign + 1);
    }
  }

  bool lacks(std::string_view name) const { return std::ranges::find(lacks_, name) != lacks_.end(); }
  const std::vector<std::string>& demands() const { return demands_; }
  const std::string* text(const std::string& name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : &found->second;
  }
  std::optional<uint64_t> number(const std::string& name) const {
    const std::string* found = text(name);
    return found == nullptr ? std::nullopt : std::optional(std::strtoull(found->c_str(), nullptr, 0));
  }
  // A device of less; more than there is would be no emulation.
  template <class T> void lower(const std::string& name, T& value) const {
    if (const auto wanted = number(name))
      value = static_cast<T>(std::min<uint64_t>(value, *wanted));
  }
  template <class T> void raise(const std::string& name, T& value) const {
    if (const auto wanted = number(name))
      value = static_cast<T>(std::max<uint64_t>(value, *wanted));
  }
  template <class T> void set(const std::string& name, T& value) const {
    if (const auto wanted = number(name))
      value = static_cast<T>(*wanted);
  }
  void set(const std::string& name, char* value, size_t size) const {
    const std::string* wanted = text(name);
    if (wanted == nullptr)
      return;
    std::string words = *wanted;
    std::ranges::replace(words, '_', ' ');
    std::strncpy(value, words.c_str(), size - 1);
  }

private:
  std::map<std::string, std::string> values_;
  std::vector<std::string> lacks_, demands_;
};

const Limits& limits() {
  static const auto& it = *new Limits;
  return it;
}

struct Below { // an instance, or a device: what comes below this layer
  VkInstance instance = VK_NULL_HANDLE;
  PFN_vkGetInstanceProcAddr get_instance = nullptr;
  InstanceFunctions vk;
  DeviceFunctions device;
};

// Physical devices have the loader's table of their instance at their beginning, which tells whose they are.
const void* table_of(const void* handle) { return *static_cast<const void* const*>(handle); }

std::mutex mutex;

Below& below(const void* handle) {
  static auto& all = *new std::map<const void*, Below>;
  const std::lock_guard lock(mutex);
  return all[table_of(handle)];
}

void change(VkPhysicalDeviceProperties& properties) {
  const Limits& to = limits();
  to.lower("api", properties.apiVersion);
  to.set("vendor", properties.vendorID);
  to.set("device", properties.deviceID);
  to.set("driver_version", properties.driverVersion);
  uint32_t type = static_cast<uint32_t>(properties.deviceType);
  to.set("type", type);
  properties.deviceType = static_cast<VkPhysicalDeviceType>(type);
  to.set("name", properties.deviceName, sizeof(properties.deviceName));
  VkPhysicalDeviceLimits& l = properties.limits;
  to.lower("invocations", l.maxComputeWorkGroupInvocations);
  for (uint32_t& size : l.maxComputeWorkGroupSize)
    to.lower("invocations", size);
  to.lower("depth", l.maxComputeWorkGroupSize[2]);
  for (uint32_t& size : l.maxComputeWorkGroupCount)
    to.lower("groups", size);
  to.lower("shared_memory", l.maxComputeSharedMemorySize);
  to.lower("push_constants", l.maxPushConstantsSize);
  to.lower("storage_buffers", l.maxPerStageDescriptorStorageBuffers);
  to.lower("storage_buffers", l.maxDescriptorSetStorageBuffers);
  to.lower("texel_buffers", l.maxPerStageDescriptorSampledImages);
  to.lower("storage_range", l.maxStorageBufferRange);
  to.lower("texel_elements", l.maxTexelBufferElements);
  to.lower("sets", l.maxBoundDescriptorSets);
  to.lower("allocations", l.maxMemoryAllocationCount);
  to.raise("alignment", l.minStorageBufferOffsetAlignment);
  to.raise("alignment", l.minTexelBufferOffsetAlignment);
}

constexpr VkBool32 no = 0;

void change(VkBaseOutStructure& item) {
  const Limits& to = limits();
  const auto lack = [&](std::string_view name, auto&... features) {
    if (to.lacks(name))
      ((features = no), ...);
  };
  switch (item.sType) {
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2:
    change(reinterpret_cast<VkPhysicalDeviceProperties2&>(item).properties);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceSubgroupProperties&>(item);
    to.set("subgroup", it.subgroupSize);
    to.set("subgroup_operations", it.supportedOperations);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceVulkan11Properties&>(item);
    to.set("subgroup", it.subgroupSize);
    to.set("subgroup_operations", it.subgroupSupportedOperations);
    to.lower("allocation", it.maxMemoryAllocationSize);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES:
    to.lower("allocation", reinterpret_cast<VkPhysicalDeviceMaintenance3Properties&>(item).maxMemoryAllocationSize);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES:
    to.set("required_subgroup_stages",
           reinterpret_cast<VkPhysicalDeviceSubgroupSizeControlProperties&>(item).requiredSubgroupSizeStages);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_PROPERTIES:
    to.set("required_subgroup_stages",
           reinterpret_cast<VkPhysicalDeviceVulkan13Properties&>(item).requiredSubgroupSizeStages);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ROBUSTNESS_2_FEATURES_KHR:
    lack("robust_access2", reinterpret_cast<VkPhysicalDeviceRobustness2FeaturesKHR&>(item).robustBufferAccess2);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceDriverProperties&>(item);
    to.set("driver", it.driverName, sizeof(it.driverName));
    to.set("driver_info", it.driverInfo, sizeof(it.driverInfo));
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2: {
    VkPhysicalDeviceFeatures& it = reinterpret_cast<VkPhysicalDeviceFeatures2&>(item).features;
    lack("int16", it.shaderInt16);
    lack("int64", it.shaderInt64);
    lack("float64", it.shaderFloat64);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_16BIT_STORAGE_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDevice16BitStorageFeatures&>(item);
    lack("storage_16bit", it.storageBuffer16BitAccess, it.uniformAndStorageBuffer16BitAccess);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_8BIT_STORAGE_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDevice8BitStorageFeatures&>(item);
    lack("storage_8bit", it.storageBuffer8BitAccess, it.uniformAndStorageBuffer8BitAccess);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceShaderFloat16Int8Features&>(item);
    lack("float16", it.shaderFloat16);
    lack("int8", it.shaderInt8);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_MEMORY_MODEL_FEATURES:
    lack("memory_model", reinterpret_cast<VkPhysicalDeviceVulkanMemoryModelFeatures&>(item).vulkanMemoryModel);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceSubgroupSizeControlFeatures&>(item);
    lack("subgroup_size_control", it.subgroupSizeControl, it.computeFullSubgroups);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES:
    lack("integer_dot_product",
         reinterpret_cast<VkPhysicalDeviceShaderIntegerDotProductFeatures&>(item).shaderIntegerDotProduct);
    break;
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceVulkan11Features&>(item);
    lack("storage_16bit", it.storageBuffer16BitAccess, it.uniformAndStorageBuffer16BitAccess);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceVulkan12Features&>(item);
    lack("storage_8bit", it.storageBuffer8BitAccess, it.uniformAndStorageBuffer8BitAccess);
    lack("float16", it.shaderFloat16);
    lack("int8", it.shaderInt8);
    lack("memory_model", it.vulkanMemoryModel);
    break;
  }
  case VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES: {
    auto& it = reinterpret_cast<VkPhysicalDeviceVulkan13Features&>(item);
    lack("subgroup_size_control", it.subgroupSizeControl, it.computeFullSubgroups);
    lack("integer_dot_product", it.shaderIntegerDotProduct);
    break;
  }
  default:
    break;
  }
}

void change_chain(void* chain) {
  for (auto* item = static_cast<VkBaseOutStructure*>(chain); item != nullptr; item = item->pNext)
    change(*item);
}

void VKAPI_PTR get_properties(VkPhysicalDevice device, VkPhysicalDeviceProperties* properties) {
  below(device).vk.GetPhysicalDeviceProperties(device, properties);
  change(*properties);
}

void VKAPI_PTR get_properties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2* properties) {
  below(device).vk.GetPhysicalDeviceProperties2(device, properties);
  change_chain(properties);
}

void VKAPI_PTR get_features(VkPhysicalDevice device, VkPhysicalDeviceFeatures* features) {
  below(device).vk.GetPhysicalDeviceFeatures(device, features);
  VkPhysicalDeviceFeatures2 chain{};
  chain.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
  chain.features = *features;
  change_chain(&chain);
  *features = chain.features;
}

void VKAPI_PTR get_features2(VkPhysicalDevice device, VkPhysicalDeviceFeatures2* features) {
  below(device).vk.GetPhysicalDeviceFeatures2(device, features);
  change_chain(features);
}

VkResult VKAPI_PTR enumerate_extensions(VkPhysicalDevice device, const char* layer, uint32_t* count,
                                        VkExtensionProperties* properties) {
  if (layer != nullptr && std::strcmp(layer, "VK_LAYER_LAPILLI_limits") == 0) {
    *count = 0;
    return VK_SUCCESS;
  }
  Below& it = below(device);
  if (layer != nullptr)
    return it.vk.EnumerateDeviceExtensionProperties(device, layer, count, properties);
  uint32_t n = 0;
  VkResult result = it.vk.EnumerateDeviceExtensionProperties(device, nullptr, &n, nullptr);
  std::vector<VkExtensionProperties> all(n);
  if (result == VK_SUCCESS)
    result = it.vk.EnumerateDeviceExtensionProperties(device, nullptr, &n, all.data());
  if (result != VK_SUCCESS)
    return result;
  std::erase_if(all, [](const VkExtensionProperties& item) { return limits().lacks(item.extensionName); });
  for (const std::string& name : limits().demands()) {
    VkExtensionProperties demanded{};
    std::strncpy(demanded.extensionName, name.c_str(), sizeof(demanded.extensionName) - 1);
    demanded.specVersion = 1;
    all.push_back(demanded);
  }
  const auto found = static_cast<uint32_t>(all.size());
  if (properties == nullptr) {
    *count = found;
    return VK_SUCCESS;
  }
  const uint32_t given = std::min(*count, found);
  std::copy_n(all.begin(), given, properties);
  *count = given;
  return given < found ? VK_INCOMPLETE : VK_SUCCESS;
}

// A driver that computes wrong: in every kernel that has the instruction, the other one stands in its place. With the word
// wrong_with_barriers=1 only in those whose invocations wait for each other, as a fault of work groups' memory would.
constexpr uint32_t control_barrier = 224;
constexpr std::pair<const char*, std::pair<uint32_t, uint32_t>> wrong_instructions[] = {
    {"add", {129, 131}},      // FAdd becomes FSub
    {"multiply", {133, 129}}, // FMul becomes FAdd
    {"less", {184, 186}},     // FOrdLessThan becomes FOrdGreaterThan
};

VkResult VKAPI_PTR create_shader(VkDevice device, const VkShaderModuleCreateInfo* info,
                                 const VkAllocationCallbacks* allocator, VkShaderModule* shader) {
  std::vector<uint32_t> code(info->pCode, info->pCode + info->codeSize / 4);
  const auto each = [&](auto visit) {
    for (size_t at = 5; at < code.size() && code[at] >> 16 != 0; at += code[at] >> 16)
      visit(code[at]);
  };
  bool waits = false;
  each([&](uint32_t word) { waits |= (word & 0xffff) == control_barrier; });
  if (const std::string* wrong = limits().text("wrong");
      wrong != nullptr && (waits || !limits().number("wrong_with_barriers")))
    for (const auto& [name, change] : wrong_instructions)
      if (*wrong == name)
        each([&, &to = change](uint32_t& word) {
          if ((word & 0xffff) == to.first)
            word = (word & 0xffff0000) | to.second;
        });
  VkShaderModuleCreateInfo changed = *info;
  changed.pCode = code.data();
  const DeviceFunctions& vk = below(device).device;
  return vk.CreateShaderModule(device, &changed, allocator, shader);
}

CreateInfo* link_of(const void* chain, VkStructureType type) {
  for (auto* item = static_cast<const CreateInfo*>(chain); item != nullptr;
       item = static_cast<const CreateInfo*>(item->next))
    if (item->type == type && item->function == 0)
      return const_cast<CreateInfo*>(item); // the loader's interface: a layer advances it
  return nullptr;
}

VkResult VKAPI_PTR create_instance(const VkInstanceCreateInfo* info, const VkAllocationCallbacks* allocator,
                                   VkInstance* instance) {
  CreateInfo* link = link_of(info->pNext, VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO);
  if (link == nullptr)
    return VK_ERROR_INITIALIZATION_FAILED;
  const PFN_vkGetInstanceProcAddr get = link->link->get_instance;
  link->link = link->link->next;
  GlobalFunctions vk;
  vk.load([&](const char* name) { return get(nullptr, name); });
  const VkResult result = vk.CreateInstance(info, allocator, instance);
  if (result != VK_SUCCESS)
    return result;
  Below& it = below(*instance);
  it.instance = *instance;
  it.get_instance = get;
  it.vk.load([&](const char* name) { return get(*instance, name); });
  return result;
}

VkResult VKAPI_PTR create_device(VkPhysicalDevice physical, const VkDeviceCreateInfo* info,
                                 const VkAllocationCallbacks* allocator, VkDevice* device) {
  CreateInfo* link = link_of(info->pNext, VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO);
  if (link == nullptr)
    return VK_ERROR_INITIALIZATION_FAILED;
  const PFN_vkGetInstanceProcAddr get = link->link->get_instance;
  InstanceFunctions vk;
  vk.GetDeviceProcAddr = reinterpret_cast<PFN_vkGetDeviceProcAddr>(link->link->get_other);
  link->link = link->link->next;
  vk.CreateDevice = reinterpret_cast<PFN_vkCreateDevice>(get(below(physical).instance, "vkCreateDevice"));
  std::vector<const char*> extensions;
  const auto is = [](const char* name) { return [name](std::string_view other) { return other == name; }; };
  for (uint32_t i = 0; i < info->enabledExtensionCount; ++i)
    if (std::ranges::none_of(limits().demands(), is(info->ppEnabledExtensionNames[i])))
      extensions.push_back(info->ppEnabledExtensionNames[i]);
  if (info->enabledExtensionCount - extensions.size() != limits().demands().size())
    return VK_ERROR_EXTENSION_NOT_PRESENT;
  VkDeviceCreateInfo changed = *info;
  changed.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  changed.ppEnabledExtensionNames = extensions.data();
  const VkResult result = vk.CreateDevice(physical, &changed, allocator, device);
  if (result != VK_SUCCESS)
    return result;
  Below& it = below(*device);
  it.vk.GetDeviceProcAddr = vk.GetDeviceProcAddr;
  it.device.load([&](const char* name) { return vk.GetDeviceProcAddr(*device, name); });
  return result;
}

PFN_vkVoidFunction VKAPI_PTR get_device_function(VkDevice device, const char* name);
PFN_vkVoidFunction VKAPI_PTR get_instance_function(VkInstance instance, const char* name);

template <class F> PFN_vkVoidFunction untyped(F function) { return reinterpret_cast<PFN_vkVoidFunction>(function); }

PFN_vkVoidFunction own(std::string_view name) {
  const std::pair<std::string_view, PFN_vkVoidFunction> functions[] = {
      {"vkGetInstanceProcAddr", untyped(get_instance_function)},
      {"vkCreateInstance", untyped(create_instance)},
      {"vkCreateDevice", untyped(create_device)},
      {"vkEnumerateDeviceExtensionProperties", untyped(enumerate_extensions)},
      {"vkGetPhysicalDeviceProperties", untyped(get_properties)},
      {"vkGetPhysicalDeviceProperties2", untyped(get_properties2)},
      {"vkGetPhysicalDeviceProperties2KHR", untyped(get_properties2)},
      {"vkGetPhysicalDeviceFeatures", untyped(get_features)},
      {"vkGetPhysicalDeviceFeatures2", untyped(get_features2)},
      {"vkGetPhysicalDeviceFeatures2KHR", untyped(get_features2)},
  };
  for (const auto& [known, function] : functions)
    if (known == name)
      return function;
  return nullptr;
}

PFN_vkVoidFunction VKAPI_PTR get_device_function(VkDevice device, const char* name) {
  if (std::strcmp(name, "vkGetDeviceProcAddr") == 0)
    return untyped(get_device_function);
  if (std::strcmp(name, "vkCreateShaderModule") == 0)
    return untyped(create_shader);
  return below(device).vk.GetDeviceProcAddr(device, name);
}

PFN_vkVoidFunction VKAPI_PTR get_instance_function(VkInstance instance, const char* name) {
  if (const PFN_vkVoidFunction found = own(name))
    return found;
  if (std::strcmp(name, "vkGetDeviceProcAddr") == 0)
    return untyped(get_device_function);
  if (std::strcmp(name, "vkCreateShaderModule") == 0)
    return untyped(create_shader);
  return instance == nullptr ? nullptr : below(instance).get_instance(instance, name);
}

} // namespace

extern "C" __attribute__((visibility("default"))) VkResult
vkNegotiateLoaderLayerInterfaceVersion(Negotiation* negotiation) {
  negotiation->version = std::min(negotiation->version, 2u);
  negotiation->get_instance = get_instance_function;
  negotiation->get_device = get_device_function;
  negotiation->get_physical_device = nullptr;
  return VK_SUCCESS;
}
