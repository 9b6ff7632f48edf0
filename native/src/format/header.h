// How a .lap file begins (format/container.h has the layout of the header).
#pragma once

#include <array>
#include <cstddef>

namespace lapilli {

inline constexpr std::array<char, 8> file_magic{'L', 'A', 'P', 'I', 'L', 'L', 'I', '\0'};
inline constexpr size_t header_size = 64;

} // namespace lapilli
