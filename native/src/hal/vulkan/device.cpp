#include "hal/vulkan/device.h"

#include "base/error.h"
#include "base/platform.h"
#include "hal/vulkan/buffer.h"
#include "hal/vulkan/commands.h"
#include "hal/vulkan/instance.h"
#include "hal/vulkan/pipelines.h"
#include "hal/vulkan/timestamps.h"

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace lapilli::vulkan {

namespace {

constexpr uint32_t most_queues = 4;

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace

std::shared_ptr<Device> Device::open(Instance& instance, uint32_t index) {
  static std::mutex mutex;
  static auto& devices = *new std::map<std::pair<Instance*, uint32_t>, std::weak_ptr<Device>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Device>& known = devices[{&instance, index}];
  if (auto device = known.lock(); device && !device->lost())
    return device;
  std::shared_ptr<Device> device(new Device(instance, index));
  known = device;
  return device;
}

Device::Device(Instance& instance, uint32_t device_index)
    : hal::Device(instance.devices[device_index].capabilities, device_index), physical(instance.devices[device_index]) {
  const uint32_t count = std::min(capabilities.queue_count, capabilities.is_cpu() ? 1u : most_queues);
  const std::vector<float> priorities(count, 1.0f);
  VkDeviceQueueCreateInfo queue_info{};
  queue_info.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
  queue_info.queueFamilyIndex = physical.queue_family;
  queue_info.queueCount = count;
  queue_info.pQueuePriorities = priorities.data();

  FeatureChain features;
  wanted_features(instance.vk, physical, features);
  VkDeviceCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
  info.pNext = &features.core;
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue_info;
  info.enabledExtensionCount = static_cast<uint32_t>(physical.extensions.names.size());
  info.ppEnabledExtensionNames = physical.extensions.names.data();
  vulkan::check(instance.vk.CreateDevice(physical.handle, &info, nullptr, &handle), "vkCreateDevice");
  vk.load([&](const char* name) { return instance.vk.GetDeviceProcAddr(handle, name); });
  try {
    for (uint32_t i = 0; i < count; ++i) {
      queues_.push_back(std::make_unique<Queue>());
      vk.GetDeviceQueue(handle, physical.queue_family, i, &queues_.back()->handle);
    }
  } catch (...) {
    vk.DestroyDevice(handle, nullptr);
    throw;
  }
  // A software driver needs the processor for the work itself.
  spin_nanoseconds_ = capabilities.is_cpu() ? 0 : capabilities.is_discrete() ? 2'000'000 : 200'000;
}

Device::Device(std::shared_ptr<Instance> instance, const lapilli_vulkan& given)
    : hal::Device(instance->devices.front().capabilities, UINT32_MAX), physical(instance->devices.front()),
      handle(static_cast<VkDevice>(given.device)), taken_(std::move(instance)) {
  vk.load([&](const char* name) { return taken_->vk.GetDeviceProcAddr(handle, name); });
  queues_.push_back(std::make_unique<Queue>());
  Queue& queue = *queues_.front();
  queue.handle = static_cast<VkQueue>(given.queue);
  queue.lock = given.lock;
  queue.unlock = given.unlock;
  queue.user = given.user;
  spin_nanoseconds_ = capabilities.is_cpu() ? 0 : capabilities.is_discrete() ? 2'000'000 : 200'000;
}

std::shared_ptr<Device> Device::take(std::shared_ptr<Instance> instance, const lapilli_vulkan& given) {
  return std::shared_ptr<Device>(new Device(std::move(instance), given));
}

Device::~Device() {
  caches_.clear();
  if (!taken_)
    vk.DestroyDevice(handle, nullptr);
}

PipelineCache& Device::pipeline_cache(const std::string& folder) {
  const std::lock_guard lock(caches_mutex_);
  std::unique_ptr<PipelineCache>& cache = caches_[folder];
  if (!cache)
    cache = std::make_unique<PipelineCache>(vk, handle, physical, folder);
  return *cache;
}

Queue& Device::queue(hal::Order order) {
  return order == hal::Order::submitted ? *queues_.front() : *queues_[next_++ % queues_.size()];
}

std::unique_ptr<hal::Buffer> Device::create_buffer(uint64_t bytes, hal::MemoryUse use, uint64_t& most) {
  return Buffer::create(*this, bytes, use, most);
}

std::unique_ptr<hal::Buffer> Device::create_shared(uint64_t bytes, hal::Handle kind) {
  return Buffer::create_shared(*this, bytes, kind);
}

std::unique_ptr<hal::Buffer> Device::import(const hal::SharedMemory& memory, uint64_t bytes) {
  return Buffer::import(*this, memory, bytes);
}

std::unique_ptr<hal::Pipelines> Device::compile(std::span<const Kernel> kernels, const std::vector<bool>& used,
                                                const std::string& cache_folder) {
  return std::make_unique<Pipelines>(*this, kernels, used, cache_folder);
}

std::unique_ptr<hal::Commands> Device::create_commands(hal::Order order) {
  return std::make_unique<Commands>(*this, queue(order));
}

std::unique_ptr<hal::Timestamps> Device::create_timestamps(uint32_t count) {
  return std::make_unique<Timestamps>(*this, count);
}

void Device::lose(VkResult result, const char* call) const {
  lost_ = true;
  fail(LAPILLI_DEVICE_LOST, "The device stopped working (", call, ", Vulkan result ", static_cast<int>(result),
       "). Load the program again, which opens the device anew; if it happens again, update the driver or choose "
       "another "
       "device with LAPILLI_DEVICE.");
}

void Device::check(VkResult result, const char* call) const {
  if (result == VK_ERROR_DEVICE_LOST)
    lose(result, call);
  vulkan::check(result, call);
}

void Device::submit(Queue& queue, VkCommandBuffer commands, VkFence fence) {
  if (lost())
    lose(VK_ERROR_DEVICE_LOST, "vkQueueSubmit");
  VkSubmitInfo info{};
  info.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
  info.commandBufferCount = 1;
  info.pCommandBuffers = &commands;
  const std::lock_guard lock(queue.mutex);
  if (queue.lock != nullptr)
    queue.lock(queue.user);
  const VkResult result = vk.QueueSubmit(queue.handle, 1, &info, fence);
  if (queue.unlock != nullptr)
    queue.unlock(queue.user);
  check(result, "vkQueueSubmit");
}

bool Device::wait(VkFence fence, uint64_t timeout) const {
  // Whether the answer is known: a driver that is out of memory has none for now. Anything else that is no success leaves
  // nobody who could say when the device is done.
  const auto answered = [&](VkResult result, const char* call) {
    if (result == VK_ERROR_OUT_OF_HOST_MEMORY || result == VK_ERROR_OUT_OF_DEVICE_MEMORY)
      return false;
    if (result < 0)
      lose(result, call);
    return true;
  };
  const auto signalled = [&] {
    const VkResult result = vk.GetFenceStatus(handle, fence);
    return answered(result, "vkGetFenceStatus") && result == VK_SUCCESS;
  };
  if (lost())
    lose(VK_ERROR_DEVICE_LOST, "vkWaitForFences");
  if (signalled())
    return true;
  const uint64_t start = nanoseconds_now();
  const uint64_t spin = std::min(spin_nanoseconds_, timeout);
  uint64_t passed = 0;
  while (passed < spin) {
    for (int i = 0; i < 16; ++i)
      relax();
    if (signalled())
      return true;
    passed = nanoseconds_now() - start;
  }
  while (passed < timeout) {
    const uint64_t rest = timeout == hal::no_timeout ? hal::no_timeout : timeout - passed;
    const VkResult result = vk.WaitForFences(handle, 1, &fence, 1, rest);
    if (answered(result, "vkWaitForFences") && result == VK_SUCCESS)
      return true;
    if (result < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (signalled()) // another way to ask
        return true;
    }
    passed = nanoseconds_now() - start;
  }
  return false;
}

} // namespace lapilli::vulkan
