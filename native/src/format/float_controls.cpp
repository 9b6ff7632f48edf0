#include "format/float_controls.h"

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string_view>

namespace lapilli {

namespace {

constexpr uint32_t header_words = 5;
constexpr uint32_t spirv_1_4 = 0x00010400;
constexpr uint32_t op_extension = 10, op_entry_point = 15, op_execution_mode = 16, op_capability = 17;
constexpr uint32_t capability_float16 = 9, capability_denorm_preserve = 4464, capability_special_preserve = 4466;
constexpr uint32_t mode_denorm_preserve = 4459, mode_rounding_toward_zero = 4463, mode_special_preserve = 4461;

void add(std::vector<uint32_t>& code, std::initializer_list<uint32_t> words) {
  const auto begin = words.begin();
  code.push_back(static_cast<uint32_t>(words.size()) << 16 | *begin);
  code.insert(code.end(), begin + 1, words.end());
}

void add_extension(std::vector<uint32_t>& code, std::string_view name) {
  const size_t words = name.size() / 4 + 1; // with the zero at the end
  code.push_back(static_cast<uint32_t>(words + 1) << 16 | op_extension);
  const size_t at = code.size();
  code.resize(at + words, 0);
  std::memcpy(code.data() + at, name.data(), name.size());
}

// What the module has that matters here.
struct Found {
  bool float16 = false, own_modes = false;
  size_t capabilities_end = header_words, entry_points_end = 0;
  std::vector<uint32_t> entry_points;
};

Found look(std::span<const uint32_t> module) {
  Found found;
  for (size_t at = header_words; at < module.size();) {
    const uint32_t length = module[at] >> 16, op = module[at] & 0xffff;
    if (length == 0 || length > module.size() - at)
      return {};
    if (op == op_capability && length > 1) {
      found.capabilities_end = at + length;
      found.float16 = found.float16 || module[at + 1] == capability_float16;
    } else if (op == op_entry_point && length > 2) {
      found.entry_points_end = at + length;
      found.entry_points.push_back(module[at + 2]);
    } else if (op == op_execution_mode && length > 2) {
      found.own_modes =
          found.own_modes || (module[at + 2] >= mode_denorm_preserve && module[at + 2] <= mode_rounding_toward_zero);
    }
    at += length;
  }
  return found;
}

} // namespace

std::vector<uint32_t> with_float_controls(std::span<const uint32_t> module, const FloatControls& controls) {
  std::vector<uint32_t> result(module.begin(), module.end());
  if (!controls.any() || module.size() <= header_words)
    return result;
  const Found found = look(module);
  if (found.entry_points.empty() || found.own_modes || found.capabilities_end > found.entry_points_end)
    return result;
  struct Mode {
    uint32_t mode, width;
  };
  std::vector<Mode> modes;
  if (controls.special_32)
    modes.push_back({mode_special_preserve, 32});
  if (controls.special_16 && found.float16)
    modes.push_back({mode_special_preserve, 16});
  const bool half_too = controls.denormal_16 && found.float16;
  const bool alone = !found.float16 || !controls.together || controls.denormal_16;
  if (controls.denormal_32 && alone)
    modes.push_back({mode_denorm_preserve, 32});
  if (half_too && (!controls.together || controls.denormal_32))
    modes.push_back({mode_denorm_preserve, 16});
  const auto asks = [&](uint32_t mode) {
    for (const Mode& m : modes)
      if (m.mode == mode)
        return true;
    return false;
  };
  if (modes.empty())
    return result;

  result.resize(found.capabilities_end);
  if (asks(mode_special_preserve))
    add(result, {op_capability, capability_special_preserve});
  if (asks(mode_denorm_preserve))
    add(result, {op_capability, capability_denorm_preserve});
  if (module[1] < spirv_1_4)
    add_extension(result, "SPV_KHR_float_controls");
  result.insert(result.end(), module.begin() + static_cast<std::ptrdiff_t>(found.capabilities_end),
                module.begin() + static_cast<std::ptrdiff_t>(found.entry_points_end));
  for (const uint32_t entry : found.entry_points)
    for (const Mode& m : modes)
      add(result, {op_execution_mode, entry, m.mode, m.width});
  result.insert(result.end(), module.begin() + static_cast<std::ptrdiff_t>(found.entry_points_end), module.end());
  return result;
}

} // namespace lapilli
