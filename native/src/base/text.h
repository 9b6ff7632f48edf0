// Text from parts: cat("buffer ", 3, " has ", size, " bytes").
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace lapilli {

inline void append(std::string& out, std::string_view text) { out += text; }
inline void append(std::string& out, char c) { out += c; }
template <std::integral T> void append(std::string& out, T value) { out += std::to_string(value); }

template <class... Parts> std::string cat(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

// "14.2 MiB", "512 bytes".
std::string human_size(uint64_t bytes);

// "a, b and c".
template <class Range> std::string listed(const Range& items, std::string_view last = "and") {
  std::string out;
  size_t count = 0;
  for (const auto& item : items) {
    (void)item;
    ++count;
  }
  size_t index = 0;
  for (const auto& item : items) {
    if (index > 0)
      out += index + 1 == count ? cat(" ", last, " ") : std::string(", ");
    append(out, item);
    ++index;
  }
  return out;
}

// Case-insensitive (ASCII) search.
bool contains_ignoring_case(std::string_view text, std::string_view part);

} // namespace lapilli
