// A Vulkan device of the application: programs and streams run on it, on its queue, and leave it as it was.

#include "lapilli.hpp"

#include "check.h"
#include "samples.h"
#include "vulkan_api.h"

#include <atomic>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <mutex>

namespace {

using Floats = std::vector<float>;

// What an engine has.
class Application {
public:
  explicit Application(bool robust = true) {
    void* library = dlopen("libvulkan.so.1", RTLD_NOW);
    get_ = reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
    lapilli::GlobalFunctions global;
    global.load([&](const char* name) { return get_(nullptr, name); });
    VkApplicationInfo application{};
    application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    application.apiVersion = VK_MAKE_API_VERSION(0, 1, 2, 0);
    VkInstanceCreateInfo instance{};
    instance.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    instance.pApplicationInfo = &application;
    CHECK(global.CreateInstance(&instance, nullptr, &instance_) == VK_SUCCESS);
    vk_.load([&](const char* name) { return get_(instance_, name); });
    uint32_t one = 1;
    CHECK(vk_.EnumeratePhysicalDevices(instance_, &one, &physical_) >= 0);
    const float priority = 1;
    VkDeviceQueueCreateInfo queue{};
    queue.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    queue.queueCount = 1;
    queue.pQueuePriorities = &priority;
    features_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    features_.features.robustBufferAccess = robust ? 1 : 0;
    VkDeviceCreateInfo device{};
    device.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    device.pNext = &features_;
    device.queueCreateInfoCount = 1;
    device.pQueueCreateInfos = &queue;
    CHECK(vk_.CreateDevice(physical_, &device, nullptr, &device_) == VK_SUCCESS);
    functions_.load([&](const char* name) { return vk_.GetDeviceProcAddr(device_, name); });
    functions_.GetDeviceQueue(device_, 0, 0, &queue_);
  }
  ~Application() { // still there
    functions_.DestroyDevice(device_, nullptr);
    vk_.DestroyInstance(instance_, nullptr);
  }
  lapilli_vulkan given() {
    lapilli_vulkan result{};
    result.get_instance_proc_addr = reinterpret_cast<void*>(get_);
    result.instance = instance_;
    result.physical_device = physical_;
    result.device = device_;
    result.queue = queue_;
    result.api_version = VK_MAKE_API_VERSION(0, 1, 2, 0);
    result.features = &features_;
    result.lock = [](void* self) { static_cast<Application*>(self)->mutex_.lock(); };
    result.unlock = [](void* self) {
      ++static_cast<Application*>(self)->locked;
      static_cast<Application*>(self)->mutex_.unlock();
    };
    result.user = this;
    return result;
  }

  std::atomic<int> locked{0};

private:
  PFN_vkGetInstanceProcAddr get_ = nullptr;
  VkInstance instance_ = nullptr;
  VkPhysicalDevice physical_ = nullptr;
  VkDevice device_ = nullptr;
  VkQueue queue_ = nullptr;
  VkPhysicalDeviceFeatures2 features_{};
  lapilli::InstanceFunctions vk_;
  lapilli::DeviceFunctions functions_;
  std::mutex mutex_;
};

bool refuses(const lapilli_vulkan& given, const char* part) {
  lapilli::Options options;
  options.vulkan = &given;
  const auto stream = lapilli::Stream::try_open(options);
  return !stream && stream.status() == lapilli::Status::invalid_argument &&
         stream.error().message.find(part) != std::string::npos;
}

} // namespace

TEST(programs_run_on_a_device_of_the_application) {
  Application application;
  const lapilli_vulkan given = application.given();
  lapilli::Options options;
  options.vulkan = &given;
  const FileBytes file = sample_program();
  const auto program = lapilli::Program::load(lapilli::Span<const std::byte>(file), options);
  const auto stream = lapilli::Stream::open(options), own = program.stream();
  CHECK(program.device().index() == UINT32_MAX && program.device().name() == stream.device().name());
  Floats x(14, 1.5f), wanted;
  for (uint32_t i = 0; i < 14; ++i)
    wanted.push_back(sample_result(1.5f, i % 7));
  const auto in = lapilli::tensor<float>(lapilli::Span<const float>(x), {2, 7});
  CHECK(program.forward({in}).values<float>() == wanted && application.locked > 0);
  CHECK(program.forward({in.vulkan(stream)}).values<float>() == wanted); // the same device
  CHECK(program.forward({in.vulkan(own)}).values<float>() == wanted);
  const auto plain = lapilli::Program::load(lapilli::Span<const std::byte>(file));
  CHECK(!plain.try_forward({in.vulkan(stream)})); // another one
}

TEST(what_was_not_turned_on_is_not_used) {
  Application application;
  lapilli_vulkan given = application.given();
  lapilli::Options options;
  options.vulkan = &given;
  options.plan = "better";
  SampleOptions sample;
  sample.impossible_first = true;
  const FileBytes file = sample_program(sample);
  options.plan.clear();
  const auto program = lapilli::Program::load(lapilli::Span<const std::byte>(file), options);
  CHECK(program.info().find("\"float16\": true") == std::string::npos &&
        program.info().find("\"float16\":true") == std::string::npos);
  CHECK(program.info().find("\"storage_16bit\":true") == std::string::npos);
}

TEST(what_is_missing_is_said) {
  Application application, careless(false);
  CHECK(refuses(careless.given(), "robustBufferAccess"));
  lapilli_vulkan given = application.given();
  given.device = nullptr;
  CHECK(refuses(given, "null"));
  given = application.given();
  given.unlock = nullptr;
  CHECK(refuses(given, "unlock"));
  given = application.given();
  given.api_version = VK_MAKE_API_VERSION(0, 1, 0, 0);
  CHECK(refuses(given, "1.1"));
  given = application.given();
  given.queue_family = 77;
  CHECK(refuses(given, "77"));
  given = application.given();
  given.features = nullptr;
  CHECK(refuses(given, "robustBufferAccess"));
  given = application.given();
  given.n_extensions = 1;
  CHECK(refuses(given, "extensions"));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
