#include "format/zip.h"

#include "base/error.h"
#include "format/header.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

namespace lapilli {

namespace {

constexpr uint32_t local_signature = 0x04034b50, entry_signature = 0x02014b50, end_signature = 0x06054b50,
                   end64_signature = 0x06064b50, locator_signature = 0x07064b50;
constexpr uint64_t local_size = 30, entry_size = 46, end_size = 22, end64_size = 56, locator_size = 20;
constexpr uint64_t most_directory = uint64_t{64} << 20, most_entries = 262'144, longest_comment = 65'535;

// Little-endian numbers in bytes whose length was checked.
template <class T> T number(std::span<const std::byte> bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

[[noreturn]] void damaged(const char* what) {
  invalid_file("The zip archive is damaged: ", what, ". Copy or download the file again.");
}

// [offset, offset + size) lies before `end`.
bool fits(uint64_t offset, uint64_t size, uint64_t end) { return offset <= end && size <= end - offset; }

struct Directory {
  uint64_t offset = 0, size = 0, entries = 0;
};

Directory find_directory(uint64_t size, const ReadFile& read) {
  const uint64_t tail = std::min(size, end_size + longest_comment);
  std::vector<std::byte> bytes(static_cast<size_t>(tail));
  read(size - tail, bytes);
  std::optional<size_t> found;
  for (size_t at = tail >= end_size ? static_cast<size_t>(tail - end_size) + 1 : 0; at-- > 0 && !found;)
    if (number<uint32_t>(bytes, at) == end_signature && at + end_size + number<uint16_t>(bytes, at + 20) == tail)
      found = at;
  if (!found)
    damaged("its end is missing");
  const size_t at = *found;
  const uint64_t end = size - tail + at;
  if (number<uint16_t>(bytes, at + 4) != number<uint16_t>(bytes, at + 6))
    damaged("it is one of several parts");
  Directory directory{number<uint32_t>(bytes, at + 16), number<uint32_t>(bytes, at + 12),
                      number<uint16_t>(bytes, at + 10)};
  uint64_t before = end; // the directory ends before this
  std::array<std::byte, locator_size> locator{};
  if (end >= locator_size + end64_size)
    read(end - locator_size, locator);
  if (number<uint32_t>(locator, 0) == locator_signature) { // the sizes have 64 bits
    const auto where = number<uint64_t>(locator, 8);
    if (!fits(where, end64_size, end - locator_size))
      damaged("its end is not where it says");
    std::array<std::byte, end64_size> wide{};
    read(where, wide);
    if (number<uint32_t>(wide, 0) != end64_signature)
      damaged("its end is not where it says");
    directory = {number<uint64_t>(wide, 48), number<uint64_t>(wide, 40), number<uint64_t>(wide, 32)};
    before = where;
  }
  if (!fits(directory.offset, directory.size, before))
    damaged("its directory does not fit into it");
  check_file(directory.size <= most_directory && directory.entries <= most_entries,
             "The directory of the zip archive has ", directory.entries, " entries in ", directory.size,
             " bytes; the limits are ", most_entries, " and ", most_directory, ".");
  return directory;
}

struct Entry {
  bool stored = false; // neither compressed nor encrypted
  uint64_t offset = 0, size = 0;
};

// The entry at `at`, which is moved to the next one.
Entry read_entry(std::span<const std::byte> bytes, size_t& at) {
  if (!fits(at, entry_size, bytes.size()) || number<uint32_t>(bytes, at) != entry_signature)
    damaged("its directory has no entry where one should be");
  const auto name = number<uint16_t>(bytes, at + 28), extra = number<uint16_t>(bytes, at + 30),
             comment = number<uint16_t>(bytes, at + 32);
  const uint64_t length = entry_size + name + extra + comment;
  if (!fits(at, length, bytes.size()))
    damaged("an entry goes beyond its directory");
  const auto flags = number<uint16_t>(bytes, at + 8), method = number<uint16_t>(bytes, at + 10);
  uint64_t packed = number<uint32_t>(bytes, at + 20), size = number<uint32_t>(bytes, at + 24),
           offset = number<uint32_t>(bytes, at + 42);
  // What does not fit into 32 bits is in a further field, in this order.
  const auto fields = bytes.subspan(at + entry_size + name, extra);
  for (size_t field = 0; field + 4 <= fields.size();) {
    const auto kind = number<uint16_t>(fields, field), bytes_of = number<uint16_t>(fields, field + 2);
    if (!fits(field + 4, bytes_of, fields.size()))
      break; // padding, of which some writers leave a rest
    if (kind == 1) {
      size_t next = field + 4;
      const size_t end = next + bytes_of;
      for (uint64_t* value : {&size, &packed, &offset})
        if (*value == UINT32_MAX) {
          if (next + 8 > end)
            damaged("an entry lacks its size");
          *value = number<uint64_t>(fields, next);
          next += 8;
        }
    }
    field += 4 + size_t{bytes_of};
  }
  at += static_cast<size_t>(length);
  return {method == 0 && (flags & 1) == 0 && packed == size, offset, size};
}

} // namespace

FilePart program_in_zip(uint64_t size, const ReadFile& read) {
  std::array<std::byte, 4> first{};
  if (size < first.size())
    return {0, size};
  read(0, first);
  if (number<uint32_t>(first, 0) != local_signature)
    return {0, size};
  const Directory directory = find_directory(size, read);
  std::vector<std::byte> bytes(static_cast<size_t>(directory.size));
  read(directory.offset, bytes);
  std::optional<FilePart> found;
  size_t at = 0;
  for (uint64_t index = 0; index < directory.entries; ++index) {
    const Entry entry = read_entry(bytes, at);
    if (!entry.stored || entry.size < header_size)
      continue;
    std::array<std::byte, local_size> local{};
    if (!fits(entry.offset, local_size, directory.offset))
      damaged("an entry is not where its directory says");
    read(entry.offset, local);
    const uint64_t start = entry.offset + local_size + number<uint16_t>(local, 26) + number<uint16_t>(local, 28);
    if (number<uint32_t>(local, 0) != local_signature || !fits(start, entry.size, directory.offset))
      damaged("an entry is not where its directory says");
    std::array<std::byte, file_magic.size()> begins{};
    read(start, begins);
    if (std::memcmp(begins.data(), file_magic.data(), file_magic.size()) != 0)
      continue;
    check_file(
        !found,
        "The zip archive has several Lapilli programs; one is accepted. Save the modules in files of their own.");
    found = FilePart{start, entry.size};
  }
  check_file(
      found.has_value(),
      "This is a zip archive (PyTorch's .pt files are) without a Lapilli program in it. Run the module of "
      "optimize_for_mobile(backend=\"vulkan\") once with an example before it is saved, or make a .lap file with "
      "lapilli.compile.");
  return *found;
}

} // namespace lapilli
