#include "hal/capabilities.h"

#include "base/json.h"
#include "format/describe.h"

namespace lapilli::hal {

std::string uuid_text(const Capabilities& device) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < device.uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10)
      text += '-';
    text += digits[device.uuid[i] >> 4];
    text += digits[device.uuid[i] & 15];
  }
  return text;
}

void describe(const Capabilities& device, uint32_t index, Json& json) {
  constexpr std::array types{"other", "integrated", "discrete", "virtual", "cpu"};
  const auto type = static_cast<size_t>(device.type);
  json.object([&] {
    json.field("index", index);
    json.field("name", device.name);
    json.field("type", types[type]);
    json.field("vendor_id", device.vendor_id);
    json.field("device_id", device.device_id);
    json.field("uuid", uuid_text(device));
    json.field("driver", device.driver);
    json.field("driver_version", device.driver_version);
    json.field("api_version", device.api_version);
    json.field("memory", device.device_memory);
    json.key("limits");
    json.object([&] {
      const DeviceLimits& limits = device.limits;
      json.field("max_workgroup_invocations", limits.max_workgroup_invocations);
      json.list("max_workgroup_size", limits.max_workgroup_size);
      json.list("max_workgroup_count", limits.max_workgroup_count);
      json.field("shared_memory", limits.shared_memory);
      json.field("push_constants", limits.push_constants);
      json.field("storage_buffers", limits.storage_buffers);
      json.field("storage_buffer_range", limits.storage_range);
      json.field("storage_buffer_offset_alignment", limits.storage_alignment);
      json.field("texel_elements", limits.texel_elements);
      json.field("texel_offset_alignment", limits.texel_alignment);
      json.field("allocation", device.max_allocation);
      json.field("subgroup_size", device.subgroup_size);
      json.field("min_subgroup_size", device.min_subgroup_size);
      json.field("max_subgroup_size", device.max_subgroup_size);
      json.list("subgroup_operations", subgroup_names(device.subgroup_operations));
      json.field("compute_units", device.compute_units);
      json.field("timestamp_period", device.timestamp_period);
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
    json.list("known_faults", device.known_faults);
    json.key("float_controls");
    json.object([&] {
      json.field("nan_and_infinity", device.float_controls.special_32);
      json.field("nan_and_infinity_16bit", device.float_controls.special_16);
      json.field("denormals", device.float_controls.denormal_32);
      json.field("denormals_16bit", device.float_controls.denormal_16);
    });
  });
}

} // namespace lapilli::hal
