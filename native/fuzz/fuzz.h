// What the fuzz targets share: a file around any bytes, so that a fuzzer need not guess sizes and checksums.
#pragma once

#include "lapilli.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

using File = std::vector<uint8_t>;

inline uint64_t get(const File& file, size_t at) {
  uint64_t value;
  std::memcpy(&value, file.data() + at, sizeof value);
  return value;
}
inline void put(File& file, size_t at, uint64_t value) { std::memcpy(file.data() + at, &value, sizeof value); }

// The bytes with a header whose sizes and checksum fit; empty when they are too few.
inline File repaired(const uint8_t* data, size_t size) {
  constexpr size_t header = 64;
  if (size < header + 8)
    return {};
  File file(data, data + size);
  std::memcpy(file.data(), "LAPILLI\0\1\0\0\0\x40\0\0\0", 16);
  uint64_t structure = get(file, 24), start = get(file, 32);
  if (structure == 0 || structure > size - header)
    structure = size - header;
  if (start % 64 != 0 || start < header + structure || start > size)
    start = (header + structure + 63) / 64 * 64;
  if (start > size)
    file.resize(static_cast<size_t>(start));
  put(file, 16, header);
  put(file, 24, structure);
  put(file, 32, start);
  put(file, 40, file.size() - start);
  put(file, 48, 0);
  put(file, 56, 0);
  const uint64_t seed = lapilli_checksum(file.data(), header, 0);
  put(file, 48, lapilli_checksum(file.data() + header, file.size() - header, seed));
  return file;
}

// A hostile file may be refused in these ways only.
inline void expect(lapilli_status status, std::initializer_list<lapilli_status> allowed) {
  for (const lapilli_status found : allowed)
    if (status == found)
      return;
  std::fprintf(stderr, "status %d: %s\n", status, lapilli_last_error());
  std::abort();
}
