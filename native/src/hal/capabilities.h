// What a device can do, in the terms of a plan's requirements.
#pragma once

#include "format/float_controls.h"
#include "format/model.h"

namespace lapilli {

class Json;

namespace hal {

enum class DeviceType { other, integrated, discrete, virtual_gpu, cpu };

struct DeviceLimits {
  uint32_t max_workgroup_invocations = 0;
  std::array<uint32_t, 3> max_workgroup_size{}, max_workgroup_count{};
  uint32_t shared_memory = 0;                          // bytes
  uint32_t push_constants = 0;                         // bytes
  uint32_t storage_buffers = 0, texel_buffers = 0;     // of a kernel
  uint64_t storage_range = 0;                          // bytes of a storage buffer at once
  uint64_t storage_alignment = 1, texel_alignment = 1; // of where one begins: powers of two
  uint32_t texel_elements = 0;                         // of a texel buffer
};

struct Capabilities {
  std::string name;
  DeviceType type = DeviceType::other;
  uint32_t vendor_id = 0;
  uint32_t device_id = 0;
  std::array<uint8_t, 16> uuid{}; // the same in other interfaces to the device
  std::string api;                // "Vulkan"
  std::string api_version;        // "1.3.290"
  uint32_t driver_version = 0;    // as the driver encodes it
  std::string driver;             // name and version for people
  DeviceLimits limits;
  uint64_t device_memory = 0;  // bytes of the largest heap of its own
  uint64_t all_memory = 0;     // bytes of all heaps
  uint64_t max_allocation = 0; // bytes of one buffer
  uint64_t host_alignment = 0; // of memory of the host that it can use as it lies; 0: none
  bool large_bar = false;      // the host sees its own memory, and more of it than a small window
  uint32_t subgroup_size = 0, min_subgroup_size = 0, max_subgroup_size = 0;
  uint32_t subgroup_operations = 0; // SubgroupOperation bits
  uint32_t compute_units = 0;       // multiprocessors, compute units, shader cores; 0: the driver does not say
  uint32_t spirv_minor = 0;         // the newest SPIR-V that it takes: 1.spirv_minor
  uint64_t features = 0;            // Feature bits
  bool uniform_storage_16bit = false, uniform_storage_8bit = false;
  std::vector<std::string> cooperative_matrices; // "float16 16x16x16 -> float32"
  std::vector<std::string> known_faults; // names in hal/known_faults.cpp: what they concern is left out of the features
  bool no_half_conversions = false;      // see there
  bool full_barriers = false;            // see there
  FloatControls float_controls;
  uint32_t queue_count = 0;
  uint32_t timestamp_bits = 0; // 0: it has none
  double timestamp_period = 0; // nanoseconds

  bool has(Feature feature) const { return (features & static_cast<uint64_t>(feature)) != 0; }
  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_discrete() const { return type == DeviceType::discrete; }
};

void describe(const Capabilities& device, uint32_t index, Json& json);

// "8-4-4-4-12" hexadecimal digits, as other tools write it.
std::string uuid_text(const Capabilities& device);

} // namespace hal

} // namespace lapilli
