#include "core/dispatch.h"

#include "base/error.h"
#include "format/file_limits.h"

#include <algorithm>

namespace lapilli {

namespace {

Region resolve_binding(const hal::Capabilities& device, const Dispatch& command, const Binding& binding,
                       BindingType type, const Values& values, std::span<const Region> regions) {
  const Region& region = regions[binding.buffer];
  const hal::DeviceLimits& limits = device.limits;
  const uint64_t offset = values.size(binding.offset, "the offset of a binding");
  const uint64_t size = values.size(binding.size, "the size of a binding");
  check_file(offset <= region.size && size <= region.size - offset, "The program is damaged: \"", command.label,
             "\" uses bytes ", offset, " to ", offset + size, " of a buffer of ", region.size, ".");
  const uint32_t texel = texel_size(type);
  if (size == 0)
    // Nothing is read or written, and a binding wants a range.
    return {region.buffer, region.offset, texel != 0 ? texel : 4};
  const uint64_t alignment = texel != 0 ? limits.texel_alignment : limits.storage_alignment;
  check_file(offset % alignment == 0, "The program cannot run on ", device.name, ": \"", command.label,
             "\" uses a buffer from offset ", offset, ", and the device wants multiples of ", alignment, ".");
  const uint64_t limit = texel != 0 ? uint64_t{limits.texel_elements} * texel : limits.storage_range;
  if (size > limit)
    fail(LAPILLI_NO_DEVICE, device.name, " cannot use ", human_size(size), " of a buffer at once, as \"", command.label,
         "\" must for these inputs: its limit is ", human_size(limit),
         ". Run smaller inputs, choose another device with LAPILLI_DEVICE, or compile with a bound of every open size "
         "(torch.export.Dim(name, max=...)): values that may be larger than 128 MiB are then bound in parts.");
  if (texel == 0)
    return {region.buffer, region.offset + offset, size};
  // Texel buffers hold whole elements, and see a little of the padding that the planner leaves (see `room` there).
  const uint64_t whole = align_up(size, texel);
  const bool padded = device.is_cpu() && offset == 0 && (whole >> 8 & 0xff) == 0 && whole + 256 <= limit;
  return {region.buffer, region.offset + offset, padded ? whole + 256 : whole};
}

} // namespace

ResolvedDispatch resolve(const hal::Capabilities& device, const Dispatch& command, const Kernel& kernel,
                         const Values& values, std::span<const Region> regions, uint64_t most_groups) {
  ResolvedDispatch result;
  const hal::DeviceLimits& limits = device.limits;
  for (size_t i = 0; i < 3; ++i) {
    const uint64_t count = values.size(command.groups[i], "a number of work groups");
    if (count > limits.max_workgroup_count[i])
      fail(LAPILLI_NO_DEVICE, "\"", command.label, "\" needs ", count, " work groups along axis ", i,
           " for these inputs, and ", device.name, " allows ", limits.max_workgroup_count[i],
           ". Run smaller inputs, or choose another device with LAPILLI_DEVICE.");
    result.groups[i] = static_cast<uint32_t>(count);
  }
  if (result.empty())
    return result;
  const uint64_t plane = uint64_t{result.groups[0]} * result.groups[1];
  check_file(plane <= most_groups / result.groups[2], "\"", command.label, "\" has ", result.groups[0], " x ",
             result.groups[1], " x ", result.groups[2], " work groups, and the limit is ", most_groups, " (groups).");
  for (size_t i = 0; i < command.params.size(); ++i)
    result.params[i] = static_cast<uint32_t>(static_cast<uint64_t>(values[command.params[i]]));
  for (size_t i = 0; i < command.bindings.size(); ++i)
    result.bindings[i] = resolve_binding(device, command, command.bindings[i], kernel.types[i], values, regions);
  return result;
}

void check_room(uint64_t size, uint64_t tensor, const Buffer& buffer) {
  check_file(size >= tensor && size - tensor <= max_padding, "The program is damaged: buffer \"", buffer.name, "\" of ",
             size, " bytes is ", size < tensor ? "smaller" : "much larger", " than what it is for, ", tensor,
             " bytes.");
}

} // namespace lapilli
