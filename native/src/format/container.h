// The outermost layer of a .lap file. All numbers are little-endian.
//
//   bytes    what
//   0..7     "LAPILLI\0"
//   8..11    version of the format: 2
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

#include "base/error.h"
#include "base/platform.h"
#include "format/file_limits.h"
#include "format/header.h"
#include "format/zip.h"

#include <future>
#include <vector>

namespace lapilli {

inline constexpr uint32_t format_version = 2;

// Where a program comes from: memory of the caller, or a file; where that is a zip archive (PyTorch's .pt files are), the program in it.
// Either may change while it is read.
class Source {
public:
  explicit Source(Bytes memory);
  explicit Source(const char* path);

  uint64_t size() const { return part_.size; }
  // Copies [offset, offset + to.size()), which lies within size().
  void read(uint64_t offset, std::span<std::byte> to) const;
  // The same bytes where they lie, or in `buffer`.
  Bytes get(uint64_t offset, uint64_t size, std::vector<std::byte>& buffer) const;

private:
  uint64_t whole() const { return file_ ? file_->size() : memory_.size(); }

  Bytes memory_;
  std::optional<File> file_;
  FilePart part_;
};

// The structure is copied into memory of our own before it is verified, and so is code: what was verified is what is used.
// Constants are read in pieces when they are wanted; nothing depends on what is in them.
class Container {
public:
  // Checks the header and, when asked, begins to compute the checksum on another thread.
  Container(const Source& source, const Limits& most, bool verify_checksum);
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  // What `use()` returns, if the checksum fits. If it does not, that is the error, whatever else went wrong.
  template <class F> auto checked(F&& use) const {
    try {
      auto result = use();
      check_checksum();
      return result;
    } catch (const Error&) {
      check_checksum();
      throw;
    }
  }

  // A part of the data section.
  void read(uint64_t offset, std::span<std::byte> to) const { source_.read(data_offset_ + offset, to); }

  const Limits& limits;
  Bytes structure;
  uint64_t data_size = 0;
  uint64_t file_size = 0;
  uint64_t checksum = 0; // as the header has it

private:
  void check_checksum() const; // waits for it

  const Source& source_;
  std::vector<uint64_t> words_; // of the structure, at an address of which FlatBuffers can read
  uint64_t data_offset_ = 0;
  std::shared_future<bool> checksum_fits_;
};

} // namespace lapilli
