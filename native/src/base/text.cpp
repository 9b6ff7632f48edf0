#include "base/text.h"

#include <algorithm>
#include <array>

namespace lapilli {

std::string human_size(uint64_t bytes) {
  static constexpr std::array units{"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024)
    return cat(bytes, " bytes");
  size_t unit = 0;
  while (bytes >> 10 * (unit + 1) >= 1024 && unit + 1 < units.size())
    ++unit;
  // To the nearest tenth, in integers: what formats floats brings 100 KB of tables along.
  const uint64_t size = uint64_t{1} << 10 * (unit + 1), whole = bytes / size, part = bytes % size * 10;
  const uint64_t tenths = part / size, rest = part % size;
  const uint64_t rounded = 10 * whole + tenths + (rest > size / 2 || (rest == size / 2 && tenths % 2 == 1) ? 1 : 0);
  return cat(rounded / 10, ".", rounded % 10, " ", units[unit]);
}

bool contains_ignoring_case(std::string_view text, std::string_view part) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::search(text.begin(), text.end(), part.begin(), part.end(),
                     [&](char a, char b) { return lower(a) == lower(b); }) != text.end();
}

} // namespace lapilli
