#include "container.h"

#include "checksum.h"
#include "error.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace lapilli {

namespace {

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t size;
  uint64_t structure_offset;
  uint64_t structure_size;
  uint64_t data_offset;
  uint64_t data_size;
  uint64_t checksum;
  uint64_t reserved;
};
static_assert(sizeof(Header) == header_size);

constexpr std::array<char, 8> magic{'L', 'A', 'P', 'I', 'L', 'L', 'I', '\0'};

uint64_t compute_checksum(Header header, Bytes body, bool mapped) {
  header.checksum = 0;
  Xxh64 hash(xxh64(&header, sizeof header, 0));
  constexpr size_t piece = size_t{4} << 20;
  for (size_t offset = 0; offset < body.size(); offset += piece) {
    const Bytes part = body.subspan(offset, std::min(piece, body.size() - offset));
    hash.update(part.data(), part.size());
    if (mapped)
      release_pages(part);
  }
  return hash.digest();
}

} // namespace

Container open_container(Bytes file, bool verify_checksum, bool mapped) {
  check_file(file.size() >= header_size, "This is not a Lapilli program: it has ", file.size(),
             " bytes, and the header alone takes ", header_size, ".");
  Header header;
  std::memcpy(&header, file.data(), sizeof header);
  check_file(header.magic == magic, "This is not a Lapilli program: it does not begin with \"LAPILLI\".");
  check_file(header.version == format_version, "The program has format version ", header.version,
             ", and this player reads version ", format_version,
             ". Compile the model again, or use the Lapilli that wrote it.");
  check_file(header.size == header_size && header.reserved == 0, "The header of the program is damaged.");
  check_file(header.structure_offset == header_size, "The header of the program is damaged: structure at ",
             header.structure_offset, ".");
  const uint64_t size = file.size();
  check_file(header.structure_size > 0 && header.structure_size <= size - header_size,
             "The program is truncated or damaged: its structure of ", header.structure_size,
             " bytes does not fit into the file of ", size, ".");
  check_file(header.data_offset >= header_size + header.structure_size && header.data_offset <= size &&
                 header.data_offset % 64 == 0 && header.data_size == size - header.data_offset,
             "The program is truncated or damaged: the file has ", size, " bytes, the header says that the data of ",
             header.data_size, " bytes begin at ", header.data_offset, ".");
  if (verify_checksum) {
    const uint64_t found = compute_checksum(header, file.subspan(header_size), mapped);
    check_file(
        found == header.checksum,
        "The program is damaged: its checksum does not fit. Copy or download it again, or compile the model again.");
  }
  return {file.subspan(header_size, static_cast<size_t>(header.structure_size)),
          file.subspan(static_cast<size_t>(header.data_offset)), file.size()};
}

} // namespace lapilli
