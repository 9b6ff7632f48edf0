#include "hal/vulkan/instance.h"

#include "base/error.h"
#include "base/fork.h"
#include "base/platform.h"
#include "hal/vulkan/device.h"
#include "hal/vulkan/driver.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#if defined(LAPILLI_LINKED_VULKAN)
extern "C" PFN_vkVoidFunction VKAPI_PTR vkGetInstanceProcAddr(VkInstance instance, const char* name);
#endif

namespace lapilli::vulkan {

namespace {

constexpr const char* validation_layer = "VK_LAYER_KHRONOS_validation";

PFN_vkGetInstanceProcAddr open_loader() {
#if defined(LAPILLI_LINKED_VULKAN)
  return vkGetInstanceProcAddr;
#else
#if defined(_WIN32)
  constexpr std::array names{"vulkan-1.dll"};
#elif defined(__APPLE__)
  constexpr std::array names{"libvulkan.1.dylib",
                             "libvulkan.dylib",
                             "libMoltenVK.dylib",
                             "@rpath/MoltenVK.framework/MoltenVK", // in an application
                             "/opt/homebrew/lib/libvulkan.1.dylib",
                             "/opt/homebrew/lib/libMoltenVK.dylib"};
#else
  constexpr std::array names{"libvulkan.so.1", "libvulkan.so"};
#endif
  for (const char* name : names)
    if (void* library = open_library(name))
      if (void* symbol = find_symbol(library, "vkGetInstanceProcAddr"))
        return reinterpret_cast<PFN_vkGetInstanceProcAddr>(symbol);
#if defined(__APPLE__)
  constexpr const char* advice = "on macOS: brew install molten-vk; for an application: embed MoltenVK.xcframework.";
#else
  constexpr const char* advice =
      "on Debian: apt install libvulkan1 mesa-vulkan-drivers (which also has a software driver).";
#endif
  fail(LAPILLI_NO_DRIVER, "No Vulkan loader was found on this machine (", names[0],
       "). Install it together with a driver for your GPU; ", advice);
#endif
}

// Prints what the validation layer reports, and appends it to $LAPILLI_VALIDATION_LOG for tests.
VkBool32 VKAPI_PTR report(VkDebugUtilsMessageSeverityFlagBitsEXT severity, VkDebugUtilsMessageTypeFlagsEXT,
                          const VkDebugUtilsMessengerCallbackDataEXT* data, void*) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const char* kind = severity == VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT ? "error" : "warning";
  const char* text = data != nullptr && data->pMessage != nullptr ? data->pMessage : "";
  std::fprintf(stderr, "Vulkan validation %s: %s\n", kind, text);
  if (const auto path = environment("LAPILLI_VALIDATION_LOG"))
    if (std::FILE* file = std::fopen(path->c_str(), "a")) {
      std::fprintf(file, "%s: %s\n", kind, text);
      std::fclose(file);
    }
  return 0;
}

std::vector<VkExtensionProperties> extensions(const GlobalFunctions& vk, const char* layer) {
  uint32_t count = 0;
  if (vk.EnumerateInstanceExtensionProperties(layer, &count, nullptr) != VK_SUCCESS)
    return {};
  std::vector<VkExtensionProperties> found(count);
  if (vk.EnumerateInstanceExtensionProperties(layer, &count, found.data()) < 0)
    return {};
  found.resize(std::min<size_t>(count, found.size()));
  return found;
}

bool has(const std::vector<VkExtensionProperties>& found, const char* name) {
  return std::ranges::any_of(found, [&](const auto& item) { return std::strcmp(item.extensionName, name) == 0; });
}

VkDebugUtilsMessengerCreateInfoEXT messenger_info() {
  VkDebugUtilsMessengerCreateInfoEXT info{};
  info.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT;
  info.messageSeverity =
      VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
  info.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
  info.pfnUserCallback = report;
  return info;
}

VkInstance create(const GlobalFunctions& vk, bool validation) {
  uint32_t version = VK_MAKE_API_VERSION(0, 1, 0, 0);
  if (vk.EnumerateInstanceVersion != nullptr)
    vk.EnumerateInstanceVersion(&version);
  if (version < VK_MAKE_API_VERSION(0, 1, 1, 0))
    fail(LAPILLI_NO_DRIVER,
         "The Vulkan loader of this machine knows Vulkan 1.0 only, and Lapilli needs 1.1: update it.");

  VkApplicationInfo application{};
  application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
  application.pApplicationName = "lapilli";
  application.pEngineName = "lapilli";
  application.apiVersion = VK_MAKE_API_VERSION(0, 1, 3, 0);

  std::vector<const char*> names;
  VkInstanceCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
  info.pApplicationInfo = &application;
  const auto available = extensions(vk, nullptr);
  if (has(available, VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME)) {
    names.push_back(VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME);
    info.flags = VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
  }

  VkDebugUtilsMessengerCreateInfoEXT messenger = messenger_info(); // for what happens during creation itself
  VkValidationFeaturesEXT features{};
  const VkValidationFeatureEnableEXT synchronization = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT;
  if (validation) {
    uint32_t count = 0;
    check(vk.EnumerateInstanceLayerProperties(&count, nullptr), "vkEnumerateInstanceLayerProperties");
    std::vector<VkLayerProperties> layers(count);
    check(vk.EnumerateInstanceLayerProperties(&count, layers.data()), "vkEnumerateInstanceLayerProperties");
    const auto offered = extensions(vk, validation_layer);
    if (std::ranges::none_of(layers, [](const auto& l) { return std::strcmp(l.layerName, validation_layer) == 0; }) ||
        !(has(offered, VK_EXT_DEBUG_UTILS_EXTENSION_NAME) || has(available, VK_EXT_DEBUG_UTILS_EXTENSION_NAME)))
      fail(LAPILLI_NO_DRIVER, "Validation was asked for, and ", validation_layer,
           " is not installed. On Debian: apt install vulkan-validationlayers. Or unset LAPILLI_VALIDATION.");
    names.push_back(VK_EXT_DEBUG_UTILS_EXTENSION_NAME);
    info.pNext = &messenger;
    if (has(offered, VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME)) {
      names.push_back(VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME);
      features.sType = VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT;
      features.enabledValidationFeatureCount = 1;
      features.pEnabledValidationFeatures = &synchronization;
      messenger.pNext = &features;
    }
    info.enabledLayerCount = 1;
    info.ppEnabledLayerNames = &validation_layer;
  }
  info.enabledExtensionCount = static_cast<uint32_t>(names.size());
  info.ppEnabledExtensionNames = names.data();
  VkInstance instance = VK_NULL_HANDLE;
  const VkResult result = vk.CreateInstance(&info, nullptr, &instance);
  if (result == VK_ERROR_INCOMPATIBLE_DRIVER || result == VK_ERROR_INITIALIZATION_FAILED)
    fail(LAPILLI_NO_DRIVER, "No Vulkan driver was found on this machine. Install the driver of your GPU, or a software "
                            "driver; on Debian: apt install mesa-vulkan-drivers.");
  check(result, "vkCreateInstance");
  return instance;
}

int rank(hal::DeviceType type) {
  switch (type) {
  case hal::DeviceType::discrete:
    return 0;
  case hal::DeviceType::integrated:
    return 1;
  case hal::DeviceType::virtual_gpu:
    return 2;
  case hal::DeviceType::other:
    return 3;
  case hal::DeviceType::cpu:
    break;
  }
  return 4;
}

} // namespace

void check(VkResult result, const char* call) {
  switch (result) {
  case VK_SUCCESS:
  case VK_INCOMPLETE:
    return;
  case VK_ERROR_OUT_OF_HOST_MEMORY:
    fail(LAPILLI_OUT_OF_MEMORY, "The machine is out of memory (", call,
         "). Close other programs, or run smaller inputs.");
  case VK_ERROR_OUT_OF_DEVICE_MEMORY:
    fail(LAPILLI_OUT_OF_MEMORY, "The device is out of memory (", call,
         "). Release other programs, run smaller inputs, or choose another device with LAPILLI_DEVICE.");
  case VK_ERROR_DEVICE_LOST: // of an open device: see Device::check
    fail(LAPILLI_DEVICE_LOST, "The device does not work (", call,
         "). Try again; if it happens again, update the driver or choose another device with LAPILLI_DEVICE.");
  default:
    fail(LAPILLI_INTERNAL, call, " failed with Vulkan result ", static_cast<int>(result),
         ". Run with LAPILLI_VALIDATION=1 and report what it prints.");
  }
}

bool validation_by_environment() {
  const auto value = environment("LAPILLI_VALIDATION");
  return value && *value != "0";
}

hal::Driver* find_driver(bool validation) {
  refuse_in_child(); // before the lock, which another thread of the parent may have held
  static std::mutex mutex;
  static std::array<Instance*, 2> instances{};
  const std::lock_guard lock(mutex);
  Instance*& instance = instances[validation ? 1 : 0];
  if (instance == nullptr) {
    DriverInUse in_use;
    std::unique_ptr<Instance> made(new Instance(validation));
    if (made->devices.empty())
      return nullptr;
    instance = made.release();
    in_use.for_ever();
  }
  return instance;
}

hal::Driver& get_driver(bool validation) {
  if (hal::Driver* driver = find_driver(validation))
    return *driver;
  fail(LAPILLI_NO_DRIVER, "No Vulkan device was found on this machine. Install the driver of your GPU, or a software "
                          "driver; on Debian: apt install mesa-vulkan-drivers.");
}

Instance::Instance(bool with_validation) : validation(with_validation) {
  get_proc = open_loader();
  GlobalFunctions global;
  global.load([&](const char* name) { return get_proc(nullptr, name); });
  handle = create(global, validation);
  vk.load([&](const char* name) { return get_proc(handle, name); });
  try {
    prepare();
  } catch (...) {
    release();
    throw;
  }
}

Instance::Instance(const lapilli_vulkan& given) : taken_(true) {
  get_proc = reinterpret_cast<PFN_vkGetInstanceProcAddr>(given.get_instance_proc_addr);
  handle = static_cast<VkInstance>(given.instance);
  vk.load([&](const char* name) { return get_proc(handle, name); });
  const TurnedOn on{given.api_version,
                    given.queue_family,
                    {given.extensions, given.n_extensions},
                    static_cast<const VkPhysicalDeviceFeatures2*>(given.features)};
  devices.push_back(query_taken(vk, static_cast<VkPhysicalDevice>(given.physical_device), on));
}

std::shared_ptr<hal::Device> take_device(const lapilli_vulkan& given) {
  refuse_in_child();
  for (const void* handle :
       {given.get_instance_proc_addr, given.instance, given.physical_device, given.device, given.queue})
    if (handle == nullptr)
      fail(LAPILLI_INVALID_ARGUMENT,
           "A handle of the application's Vulkan device is null: get_instance_proc_addr, instance, "
           "physical_device, device and queue must be given.");
  if (given.n_extensions > 0 && given.extensions == nullptr)
    fail(LAPILLI_INVALID_ARGUMENT, "The names of the ", given.n_extensions,
         " extensions of the application's device are null.");
  if ((given.lock == nullptr) != (given.unlock == nullptr))
    fail(LAPILLI_INVALID_ARGUMENT, "lock and unlock of the application's queue must both be given, or neither.");
  static std::mutex mutex;
  static auto& taken = *new std::map<void*, std::weak_ptr<Device>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Device>& known = taken[given.device];
  if (auto device = known.lock(); device && !device->lost())
    return device;
  DriverInUse in_use;
  auto device = Device::take(std::make_shared<Instance>(given), given);
  known = device;
  in_use.for_ever();
  return device;
}

Instance::~Instance() { release(); }

void Instance::release() {
  if (taken_)
    return;
  if (messenger_ != VK_NULL_HANDLE)
    vk.DestroyDebugUtilsMessengerEXT(handle, messenger_, nullptr);
  vk.DestroyInstance(handle, nullptr);
}

void Instance::prepare() {
  if (validation) {
    const VkDebugUtilsMessengerCreateInfoEXT info = messenger_info();
    check(vk.CreateDebugUtilsMessengerEXT(handle, &info, nullptr, &messenger_), "vkCreateDebugUtilsMessengerEXT");
  }
  enumerate();
}

void Instance::enumerate() {
  std::vector<VkPhysicalDevice> found;
  VkResult result = VK_INCOMPLETE;
  while (result == VK_INCOMPLETE) { // a device came between the two calls
    uint32_t count = 0;
    result = vk.EnumeratePhysicalDevices(handle, &count, nullptr);
    found.assign(result == VK_SUCCESS ? count : 0, VK_NULL_HANDLE);
    if (!found.empty())
      result = vk.EnumeratePhysicalDevices(handle, &count, found.data());
    found.resize(std::min<size_t>(count, found.size()));
  }
  if (result == VK_ERROR_INITIALIZATION_FAILED)
    fail(LAPILLI_NO_DRIVER,
         "The Vulkan driver of this machine does not start (vkEnumeratePhysicalDevices). Look at it "
         "with vulkaninfo, and install the driver of your GPU again, or a software driver; on Debian: "
         "apt install mesa-vulkan-drivers.");
  check(result, "vkEnumeratePhysicalDevices");
  for (const VkPhysicalDevice device : found)
    if (auto found_device = query_device(vk, device))
      devices.push_back(std::move(*found_device));
  std::ranges::stable_sort(devices, std::less{},
                           [](const PhysicalDevice& device) { return rank(device.capabilities.type); });
}

std::shared_ptr<hal::Device> Instance::open(uint32_t index) { return Device::open(*this, index); }

} // namespace lapilli::vulkan
