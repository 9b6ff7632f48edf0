// The outermost layer of a .lap file. All numbers are little-endian.
//
//   bytes    what
//   0..7     "LAPILLI\0"
//   8..11    version of the format: 1
//   12..15   size of this header: 64
//   16..31   offset and size of the structure (a FlatBuffer, native/schema/program.fbs); the offset is 64
//   32..47   offset and size of the data section; the offset is a multiple of 64, and the file ends with the section
//   48..55   checksum: XXH64 of all bytes after the header, seeded with the XXH64 (seed 0) of the header in which the
//            checksum is zero
//   56..63   zero
//
// The checksum guards against damage, not against malice. Whatever it says, the structure is verified before it is
// used.
#pragma once

#include "platform.h"

namespace lapilli {

inline constexpr size_t header_size = 64;
inline constexpr uint32_t format_version = 1;

struct Container {
  Bytes structure;
  Bytes data;
  size_t file_size = 0;
};

// Checks the header and, when asked, the checksum. `mapped`: the bytes are a mapped file, whose pages are given back as
// they were hashed, so that reading a large file does not fill the memory.
Container open_container(Bytes file, bool verify_checksum, bool mapped);

} // namespace lapilli
