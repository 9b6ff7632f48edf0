// A Vulkan loader in front of the real one, for tests: it makes the calls fail that it is told to, counts what is created
// and destroyed, and notices what is destroyed while the device still works on it.
//
// Every function that returns a result is wrapped by one template; which results it may return is what the specification
// says. A device that is said to be lost finishes its work first: a software driver goes on whatever the loader says.

#include "fault_loader.h"
#include "vulkan_api.h"

#include <dlfcn.h> // and vk.DeviceWaitIdle

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>

namespace {

std::mutex& mutex() {
  static auto& it = *new std::mutex; // used while the process ends
  return it;
}

struct State {
  long n = 0, count = 0, calls = 0;
  int kind = 0;
  std::thread::id armed_by;
  const char* fired = nullptr;
  std::map<std::string, long> live;
  std::map<VkQueue, VkDevice> devices; // of queues
  std::set<VkFence> submitted;
  std::set<VkDevice> lost;
  std::string left, violation;
};

State& state() {
  static auto& it = *new State;
  return it;
}

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  for (const std::string_view other : names)
    if (other == name)
      return true;
  return false;
}

bool may_lose_device(std::string_view name) {
  return one_of(name, {"vkQueueSubmit", "vkGetFenceStatus", "vkWaitForFences", "vkGetQueryPoolResults"});
}

VkResult memory_result(std::string_view name) {
  if (one_of(name, {"vkCreatePipelineCache", "vkEnumerateInstanceExtensionProperties", "vkCreatePipelineLayout"}))
    return VK_ERROR_OUT_OF_HOST_MEMORY;
  return VK_ERROR_OUT_OF_DEVICE_MEMORY;
}

bool inject(const char* name, VkResult& result) {
  State& s = state();
  const std::lock_guard lock(mutex());
  if (s.n == 0 || (s.kind != fault_out_of_memory && !may_lose_device(name)))
    return false;
  if (s.kind == fault_device_lost_here && std::this_thread::get_id() != s.armed_by)
    return false;
  ++s.calls;
  if (s.calls < s.n || s.calls >= s.n + s.count)
    return false;
  if (s.fired == nullptr)
    s.fired = name;
  result = s.kind == fault_out_of_memory ? memory_result(name) : VK_ERROR_DEVICE_LOST;
  return true;
}

// Functions of this file, by name. Each is a type with a static text.
#define FUNCTION(name)                         \
  struct name##_ {                             \
    static constexpr const char* text = #name; \
    using Type = PFN_##name;                   \
  };

template <class Name> typename Name::Type real = nullptr;

void count(const char* name, std::string_view made, std::string_view ended) {
  std::string_view text(name + 2);
  const bool begins = text.starts_with(made);
  if (!begins && !text.starts_with(ended))
    return;
  std::string what(text.substr(begins ? made.size() : ended.size()));
  if (what == "ComputePipelines")
    what = "Pipeline";
  const std::lock_guard lock(mutex());
  state().live[what] += begins ? 1 : -1;
}

void count(const char* name) {
  count(name, "Create", "Destroy");
  if (one_of(name, {"vkAllocateMemory", "vkFreeMemory"}))
    count(name, "Allocate", "Free");
}

FUNCTION(vkDeviceWaitIdle)

void lose(VkDevice device) {
  if (real<vkDeviceWaitIdle_> != nullptr)
    real<vkDeviceWaitIdle_>(device);
  const std::lock_guard lock(mutex());
  state().lost.insert(device);
}

bool is_lost(VkDevice device) {
  const std::lock_guard lock(mutex());
  return state().lost.contains(device);
}

VkDevice device_of(VkDevice device) { return device; }
VkDevice device_of(VkQueue queue) {
  const std::lock_guard lock(mutex());
  return state().devices[queue];
}
template <class T> VkDevice device_of(T) { return VK_NULL_HANDLE; }

template <class Name, class F = typename Name::Type> struct Wrapped;

template <class Name, class First, class... Rest> struct Wrapped<Name, VkResult(VKAPI_PTR*)(First, Rest...)> {
  static VkResult VKAPI_PTR call(First first, Rest... rest) {
    const VkDevice device = device_of(first);
    if (may_lose_device(Name::text) && is_lost(device))
      return VK_ERROR_DEVICE_LOST;
    VkResult result = VK_SUCCESS;
    if (inject(Name::text, result)) {
      if (result == VK_ERROR_DEVICE_LOST)
        lose(device);
      if constexpr (std::is_same_v<typename Name::Type, PFN_vkCreateComputePipelines>)
        clear(rest...);
      return result;
    }
    result = real<Name>(first, rest...);
    if (result == VK_SUCCESS)
      count(Name::text);
    return result;
  }
  static void clear(VkPipelineCache, uint32_t n, const VkComputePipelineCreateInfo*, const VkAllocationCallbacks*,
                    VkPipeline* pipelines) {
    for (uint32_t i = 0; i < n; ++i)
      pipelines[i] = VK_NULL_HANDLE;
  }
};

// What is destroyed.
template <class Name, class Handle>
struct Wrapped<Name, void(VKAPI_PTR*)(VkDevice, Handle, const VkAllocationCallbacks*)> {
  static void VKAPI_PTR call(VkDevice device, Handle handle, const VkAllocationCallbacks* allocator) {
    if (handle != VK_NULL_HANDLE)
      count(Name::text);
    real<Name>(device, handle, allocator);
  }
};

FUNCTION(vkAllocateCommandBuffers)
FUNCTION(vkAllocateDescriptorSets)
FUNCTION(vkAllocateMemory)
FUNCTION(vkBeginCommandBuffer)
FUNCTION(vkBindBufferMemory)
FUNCTION(vkCreateBuffer)
FUNCTION(vkCreateBufferView)
FUNCTION(vkCreateCommandPool)
FUNCTION(vkCreateComputePipelines)
FUNCTION(vkCreateDescriptorPool)
FUNCTION(vkCreateDescriptorSetLayout)
FUNCTION(vkCreateDevice)
FUNCTION(vkCreateFence)
FUNCTION(vkCreateInstance)
FUNCTION(vkCreatePipelineCache)
FUNCTION(vkCreatePipelineLayout)
FUNCTION(vkCreateQueryPool)
FUNCTION(vkCreateShaderModule)
FUNCTION(vkDestroyBuffer)
FUNCTION(vkDestroyBufferView)
FUNCTION(vkDestroyCommandPool)
FUNCTION(vkDestroyDescriptorPool)
FUNCTION(vkDestroyDescriptorSetLayout)
FUNCTION(vkDestroyDevice)
FUNCTION(vkDestroyFence)
FUNCTION(vkDestroyPipeline)
FUNCTION(vkDestroyPipelineCache)
FUNCTION(vkDestroyPipelineLayout)
FUNCTION(vkDestroyQueryPool)
FUNCTION(vkDestroyShaderModule)
FUNCTION(vkEndCommandBuffer)
FUNCTION(vkEnumerateDeviceExtensionProperties)
FUNCTION(vkEnumerateInstanceExtensionProperties)
FUNCTION(vkEnumeratePhysicalDevices)
FUNCTION(vkFreeMemory)
FUNCTION(vkGetDeviceProcAddr)
FUNCTION(vkGetDeviceQueue)
FUNCTION(vkGetFenceStatus)
FUNCTION(vkGetInstanceProcAddr)
FUNCTION(vkGetPipelineCacheData)
FUNCTION(vkGetQueryPoolResults)
FUNCTION(vkInvalidateMappedMemoryRanges)
FUNCTION(vkMapMemory)
FUNCTION(vkQueueSubmit)
FUNCTION(vkResetFences)
FUNCTION(vkWaitForFences)

VkResult VKAPI_PTR queue_submit(VkQueue queue, uint32_t n, const VkSubmitInfo* info, VkFence fence) {
  const VkResult result = Wrapped<vkQueueSubmit_>::call(queue, n, info, fence);
  const std::lock_guard lock(mutex());
  if (result == VK_SUCCESS)
    state().submitted.insert(fence);
  return result;
}

VkResult VKAPI_PTR reset_fences(VkDevice device, uint32_t n, const VkFence* fences) {
  const VkResult result = Wrapped<vkResetFences_>::call(device, n, fences);
  const std::lock_guard lock(mutex());
  for (uint32_t i = 0; result == VK_SUCCESS && i < n; ++i)
    state().submitted.erase(fences[i]);
  return result;
}

void VKAPI_PTR destroy_fence(VkDevice device, VkFence fence, const VkAllocationCallbacks* allocator) {
  bool submitted = false;
  {
    const std::lock_guard lock(mutex());
    submitted = state().submitted.erase(fence) != 0;
  }
  if (submitted && !is_lost(device) && real<vkGetFenceStatus_>(device, fence) == VK_NOT_READY) {
    const std::lock_guard lock(mutex());
    state().violation = "a fence, with commands that the device had not finished";
  }
  Wrapped<vkDestroyFence_>::call(device, fence, allocator);
}

void VKAPI_PTR get_device_queue(VkDevice device, uint32_t family, uint32_t index, VkQueue* queue) {
  real<vkGetDeviceQueue_>(device, family, index, queue);
  const std::lock_guard lock(mutex());
  state().devices[*queue] = device;
}

void VKAPI_PTR destroy_device(VkDevice device, const VkAllocationCallbacks* allocator) {
  if (device != VK_NULL_HANDLE)
    count(vkDestroyDevice_::text);
  {
    const std::lock_guard lock(mutex());
    state().lost.erase(device);
  }
  real<vkDestroyDevice_>(device, allocator);
}

PFN_vkVoidFunction wrapped(const char* name, PFN_vkVoidFunction function);

PFN_vkGetInstanceProcAddr of_loader = nullptr;
VkInstance instance_of_devices = VK_NULL_HANDLE;

// What is wrapped is the loader's function, which finds the driver of a device; one of a device is for that driver alone.
PFN_vkVoidFunction VKAPI_PTR get_device_proc(VkDevice device, const char* name) {
  const PFN_vkVoidFunction of_driver = real<vkGetDeviceProcAddr_>(device, name);
  const PFN_vkVoidFunction of_all = of_loader(instance_of_devices, name);
  if (of_driver == nullptr || of_all == nullptr)
    return of_driver;
  const PFN_vkVoidFunction function = wrapped(name, of_all);
  return function == of_all ? of_driver : function;
}

template <class Name> bool replaced(const char* name, PFN_vkVoidFunction& function, typename Name::Type by = nullptr) {
  if (std::strcmp(name, Name::text) != 0)
    return false;
  real<Name> = reinterpret_cast<typename Name::Type>(function);
  if (by == nullptr)
    if constexpr (requires { &Wrapped<Name>::call; })
      by = &Wrapped<Name>::call;
  function = reinterpret_cast<PFN_vkVoidFunction>(by);
  return true;
}

template <class... Names> bool any_replaced(const char* name, PFN_vkVoidFunction& function) {
  return (replaced<Names>(name, function) || ...);
}

PFN_vkVoidFunction wrapped(const char* name, PFN_vkVoidFunction function) {
  if (function == nullptr)
    return function;
  replaced<vkGetDeviceProcAddr_>(name, function, get_device_proc) ||
      replaced<vkQueueSubmit_>(name, function, queue_submit) ||
      replaced<vkResetFences_>(name, function, reset_fences) ||
      replaced<vkDestroyFence_>(name, function, destroy_fence) ||
      replaced<vkGetDeviceQueue_>(name, function, get_device_queue) ||
      replaced<vkDestroyDevice_>(name, function, destroy_device) ||
      any_replaced<vkAllocateCommandBuffers_, vkAllocateDescriptorSets_, vkAllocateMemory_, vkBeginCommandBuffer_,
                   vkBindBufferMemory_, vkCreateBuffer_, vkCreateBufferView_, vkCreateCommandPool_,
                   vkCreateComputePipelines_, vkCreateDescriptorPool_, vkCreateDescriptorSetLayout_, vkCreateDevice_,
                   vkCreateFence_, vkCreateInstance_, vkCreatePipelineCache_, vkCreatePipelineLayout_,
                   vkCreateQueryPool_, vkCreateShaderModule_, vkDestroyBuffer_, vkDestroyBufferView_,
                   vkDestroyCommandPool_, vkDestroyDescriptorPool_, vkDestroyDescriptorSetLayout_, vkDestroyPipeline_,
                   vkDestroyPipelineCache_, vkDestroyPipelineLayout_, vkDestroyQueryPool_, vkDestroyShaderModule_,
                   vkEndCommandBuffer_, vkEnumerateDeviceExtensionProperties_, vkEnumerateInstanceExtensionProperties_,
                   vkEnumeratePhysicalDevices_, vkFreeMemory_, vkGetFenceStatus_, vkGetPipelineCacheData_,
                   vkGetQueryPoolResults_, vkInvalidateMappedMemoryRanges_, vkMapMemory_, vkWaitForFences_>(name,
                                                                                                            function);
  if (std::strcmp(name, vkDeviceWaitIdle_::text) == 0)
    real<vkDeviceWaitIdle_> = reinterpret_cast<PFN_vkDeviceWaitIdle>(function);
  return function;
}

void arm(long n, int kind, long count) {
  const std::lock_guard lock(mutex());
  State& s = state();
  s.n = n;
  s.kind = kind;
  s.armed_by = std::this_thread::get_id();
  s.count = count;
  s.calls = 0;
  if (n != 0) {
    s.fired = nullptr;
    s.violation.clear();
  }
}

const char* fired() { return state().fired; }

const char* left() {
  const std::lock_guard lock(mutex());
  State& s = state();
  s.left.clear();
  for (const auto& [what, number] : s.live)
    if (number != 0 && what != "Instance")
      s.left += what + " " + std::to_string(number) + " ";
  return s.left.c_str();
}

const char* violation() { return state().violation.empty() ? nullptr : state().violation.c_str(); }

} // namespace

extern "C" __attribute__((visibility("default"))) const FaultControl fault_control{arm, fired, left, violation};

extern "C" __attribute__((visibility("default"))) PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance instance,
                                                                                           const char* name) {
  static void* library = dlopen(LAPILLI_REAL_LOADER, RTLD_NOW | RTLD_LOCAL);
  static auto get = library == nullptr
                        ? nullptr
                        : reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
  if (get == nullptr)
    return nullptr;
  of_loader = get;
  if (instance != VK_NULL_HANDLE)
    instance_of_devices = instance;
  if (std::strcmp(name, "vkGetInstanceProcAddr") == 0)
    return reinterpret_cast<PFN_vkVoidFunction>(&vkGetInstanceProcAddr);
  const PFN_vkVoidFunction function = wrapped(name, get(instance, name));
  if (std::strcmp(name, "vkGetDeviceProcAddr") == 0 && instance != VK_NULL_HANDLE)
    real<vkDeviceWaitIdle_> = reinterpret_cast<PFN_vkDeviceWaitIdle>(get(instance, "vkDeviceWaitIdle"));
  return function;
}
