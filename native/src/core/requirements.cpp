#include "core/requirements.h"

#include "base/text.h"
#include "format/describe.h"

#include <algorithm>

namespace lapilli {

namespace {

// SPIR-V capabilities that need a feature of the device. A plan that forgot to require one is found out here.
struct Needed {
  uint32_t capability;
  uint64_t feature;
  const char* words;
};

constexpr uint64_t bit(Feature feature) { return static_cast<uint64_t>(feature); }

constexpr Needed needed[] = {
    {9, bit(Feature::float16), "16-bit floating-point arithmetic"},
    {10, bit(Feature::float64), "64-bit floating-point arithmetic"},
    {11, bit(Feature::int64), "64-bit integers"},
    {22, bit(Feature::int16), "16-bit integers"},
    {39, bit(Feature::int8), "8-bit integers"},
    {4433, bit(Feature::storage_16bit), "16-bit values in buffers"},
    {4448, bit(Feature::storage_8bit), "8-bit values in buffers"},
    {5116, bit(Feature::bfloat16_matrix), "values in bfloat16"},
    {5118, bit(Feature::bfloat16_matrix), "cooperative matrices of bfloat16 16x16x16"},
    {5345, bit(Feature::memory_model), "a memory model with scopes"},
    {6018, bit(Feature::integer_dot_product), "integer dot products"},
    {6019, bit(Feature::integer_dot_product), "integer dot products"},
    {6022, bit(Feature::cooperative_matrix), "cooperative matrices of fp16 16x16x16"},
};

constexpr Needed size_control{0, bit(Feature::subgroup_size_control), "control of the subgroup size"};
constexpr Needed byte_matrices{0, bit(Feature::int8_matrix), "cooperative matrices of int8 16x16x32"};
constexpr Needed packed_dot{0, bit(Feature::packed_dot_product), "dot products of 8-bit integers in hardware"};

// SPIR-V capabilities of subgroup operations: GroupNonUniform (61) is basic, and the rest follow in the order of ours.
constexpr uint32_t first_subgroup_capability = 61, last_subgroup_capability = 68;
static_assert(static_cast<uint32_t>(schema::SubgroupOperation::quad) ==
              1u << (last_subgroup_capability - first_subgroup_capability));

constexpr size_t most_reasons = 16; // nobody reads more

class Judge {
public:
  explicit Judge(const hal::Capabilities& device) : device_(device) {}

  void plan(const Requirements& wanted) {
    if (wanted.device == DeviceKind::gpu && device_.is_cpu())
      add("it is for GPUs, and this device is a CPU");
    if (wanted.device == DeviceKind::cpu && !device_.is_cpu())
      add("it is for CPU drivers, and this device is a GPU");
    features(wanted.features & ~device_.features);
    const hal::DeviceLimits& limits = device_.limits;
    at_most("invocations in a work group", wanted.max_workgroup_invocations, limits.max_workgroup_invocations);
    for (size_t i = 0; i < 3; ++i)
      at_most("invocations along an axis of a work group", wanted.max_workgroup_size[i], limits.max_workgroup_size[i]);
    at_most("bytes of shared memory", wanted.shared_memory, limits.shared_memory);
    at_most("storage buffers in a kernel", wanted.max_bindings, limits.storage_buffers);
    at_most("elements in a texel buffer", wanted.max_texel_elements, limits.texel_elements);
    at_once(wanted.storage_range);
    subgroup_size(wanted.subgroup_size);
    subgroup_operations(wanted.subgroup_operations);
  }

  void kernel(const Kernel& kernel) {
    const hal::DeviceLimits& limits = device_.limits;
    at_most("invocations in a work group", uint64_t{kernel.local[0]} * kernel.local[1] * kernel.local[2],
            limits.max_workgroup_invocations);
    for (size_t i = 0; i < 3; ++i)
      at_most("invocations along an axis of a work group", kernel.local[i], limits.max_workgroup_size[i]);
    at_most("bytes of shared memory", kernel.shared_size, limits.shared_memory);
    const auto storage = std::ranges::count(kernel.types, BindingType::storage);
    at_most("storage buffers in a kernel", static_cast<uint64_t>(storage), limits.storage_buffers);
    at_most("texel buffers in a kernel", kernel.types.size() - static_cast<size_t>(storage), limits.texel_buffers);
    at_most("bytes of push constants", kernel.push_size, limits.push_constants);
    subgroup_size(kernel.subgroup_size);
    if (kernel.converts_halves && device_.no_half_conversions)
      add("its kernels convert 16-bit floats, which ends the process with this driver; update it");
    if (kernel.multiplies_bytes && (device_.features & byte_matrices.feature) == 0)
      feature(byte_matrices.words);
    const uint32_t spirv_minor = kernel.spirv_version >> 8 & 0xff;
    if (spirv_minor > device_.spirv_minor)
      add(cat("its kernels are SPIR-V 1.", spirv_minor, ", and the device takes 1.", device_.spirv_minor, " at most"));
    for (const uint32_t capability : kernel.capabilities) {
      for (const Needed& item : needed)
        if (item.capability == capability && (device_.features & item.feature) == 0)
          feature(item.words);
      if (capability >= first_subgroup_capability && capability <= last_subgroup_capability)
        subgroup_operations(1u << (capability - first_subgroup_capability));
      if (capability == 4434 && !device_.uniform_storage_16bit)
        feature("16-bit values in uniform and storage buffers");
      if (capability == 4449 && !device_.uniform_storage_8bit)
        feature("8-bit values in uniform and storage buffers");
    }
  }

  Missing found() && { return std::move(found_); }

  void binding(BindingType type, uint64_t size) {
    if (const uint32_t texel = texel_size(type))
      at_most("elements in a texel buffer", size / texel, device_.limits.texel_elements);
    else
      at_once(size);
  }

private:
  void add(const std::string& reason) {
    found_.only_sizes = false;
    note(reason);
  }

  void note(const std::string& reason) {
    std::vector<std::string>& reasons = found_.reasons;
    if (reasons.size() < most_reasons && std::ranges::find(reasons, reason) == reasons.end())
      reasons.push_back(reason);
  }

  void at_once(uint64_t bytes) {
    const uint64_t limit = device_.limits.storage_range;
    if (bytes <= limit)
      return;
    found_.at_once = std::max(found_.at_once, bytes);
    note(more_than("bytes of a storage buffer at once", bytes, limit));
  }

  void feature(std::string_view words) { add(cat("the device lacks ", words)); }

  void features(uint64_t lacking) {
    uint64_t named = 0;
    const auto take = [&](const Needed& item) {
      if ((lacking & item.feature & ~named) != 0) {
        feature(item.words);
        named |= item.feature;
      }
    };
    for (const Needed& item : needed)
      take(item);
    take(size_control);
    take(packed_dot);
    take(byte_matrices);
    for (const std::string& name : feature_names(lacking & ~named))
      feature(name); // a newer compiler knows more than this player
  }

  void at_most(const char* what, uint64_t wanted, uint64_t limit) {
    if (wanted > limit)
      add(more_than(what, wanted, limit));
  }

  static std::string more_than(const char* what, uint64_t wanted, uint64_t limit) {
    return cat("it needs ", wanted, " ", what, ", and the device allows ", limit);
  }

  void subgroup_size(uint32_t wanted) {
    if (wanted == 0)
      return;
    if (device_.has(Feature::subgroup_size_control)) {
      if (wanted < device_.min_subgroup_size || wanted > device_.max_subgroup_size)
        add(cat("it needs subgroups of ", wanted, ", and the device has ", device_.min_subgroup_size, " to ",
                device_.max_subgroup_size));
    } else if (wanted != device_.subgroup_size) {
      add(cat("it needs subgroups of ", wanted, ", and the device has ", device_.subgroup_size));
    }
  }

  void subgroup_operations(uint32_t wanted) {
    for (const std::string& name : subgroup_names(wanted & ~device_.subgroup_operations))
      feature(cat("subgroup operations: ", name));
  }

  const hal::Capabilities& device_;
  Missing found_;
};

} // namespace

Missing missing(const hal::Capabilities& device, const Plan& plan, std::span<const Kernel> kernels,
                const Values& values, const std::vector<bool>& dynamic) {
  Judge judge(device);
  judge.plan(plan.requirements);
  std::vector<bool> seen(kernels.size());
  for (const auto* commands : {&plan.load, &plan.run})
    for (const Dispatch& command : *commands) {
      if (!seen[command.kernel]) {
        seen[command.kernel] = true;
        judge.kernel(kernels[command.kernel]);
      }
      for (size_t i = 0; i < command.bindings.size(); ++i)
        if (const Binding& binding = command.bindings[i]; !dynamic[binding.size]) // others: when a run is recorded
          judge.binding(kernels[command.kernel].types[i], values.size(binding.size, "the size of a binding"));
    }
  return std::move(judge).found();
}

} // namespace lapilli
