#include "format/container.h"

#include "base/error.h"
#include "format/checksum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>

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

constexpr uint64_t piece = uint64_t{1} << 20;
constexpr uint64_t large = uint64_t{1} << 20; // a thread costs less than the checksum of so many bytes

// The structure is hashed where it will be used, so that what was hashed is what is verified.
uint64_t compute_checksum(Header header, Bytes structure, const Source& source) {
  header.checksum = 0;
  Xxh64 hash(xxh64(&header, sizeof header, 0));
  hash.update(structure.data(), structure.size());
  std::vector<std::byte> buffer;
  for (uint64_t at = header_size + structure.size(); at < source.size(); at += piece) {
    const Bytes part = source.get(at, std::min(piece, source.size() - at), buffer);
    hash.update(part.data(), part.size());
  }
  return hash.digest();
}

} // namespace

Source::Source(Bytes memory) : memory_(memory), part_{0, whole()} {
  part_ = program_in_zip(whole(), [this](uint64_t offset, std::span<std::byte> to) { read(offset, to); });
}

Source::Source(const char* path) : file_(std::in_place, path), part_{0, whole()} {
  part_ = program_in_zip(whole(), [this](uint64_t offset, std::span<std::byte> to) { read(offset, to); });
}

void Source::read(uint64_t offset, std::span<std::byte> to) const {
  if (to.empty())
    return;
  if (file_)
    file_->read(part_.offset + offset, to);
  else
    std::memcpy(to.data(), memory_.data() + part_.offset + offset, to.size());
}

Bytes Source::get(uint64_t offset, uint64_t size, std::vector<std::byte>& buffer) const {
  if (!file_)
    return memory_.subspan(static_cast<size_t>(part_.offset + offset), static_cast<size_t>(size));
  buffer.resize(static_cast<size_t>(size));
  read(offset, buffer);
  return buffer;
}

Container::Container(const Source& source, const Limits& most, bool verify_checksum) : limits(most), source_(source) {
  const uint64_t size = source.size();
  check_file(size >= header_size, "This is not a Lapilli program: it has ", size, " bytes, and the header alone takes ",
             header_size, ".");
  Header header;
  source.read(0, std::as_writable_bytes(std::span(&header, 1)));
  check_file(header.magic == file_magic, "This is not a Lapilli program: it does not begin with \"LAPILLI\".");
  check_file(header.version == format_version, "The program has format version ", header.version,
             ", and this player reads version ", format_version,
             ". Compile the model again, or use the Lapilli that wrote it.");
  check_file(header.size == header_size && header.reserved == 0, "The header of the program is damaged.");
  check_file(header.structure_offset == header_size, "The header of the program is damaged: structure at ",
             header.structure_offset, ".");
  check_file(header.structure_size > 0 && header.structure_size <= size - header_size,
             "The program is truncated or damaged: its structure of ", header.structure_size,
             " bytes does not fit into the file of ", size, ".");
  check_file(header.data_offset >= header_size + header.structure_size && header.data_offset <= size &&
                 header.data_offset % 64 == 0 && header.data_size == size - header.data_offset,
             "The program is truncated or damaged: the file has ", size, " bytes, the header says that the data of ",
             header.data_size, " bytes begin at ", header.data_offset, ".");
  check_file(header.structure_size <= limits.structure_bytes, "The structure of the program has ",
             header.structure_size, " bytes, and the limit is ", limits.structure_bytes, " (structure_bytes).");
  words_.resize(static_cast<size_t>((header.structure_size + 7) / 8));
  const auto bytes = std::as_writable_bytes(std::span(words_)).first(static_cast<size_t>(header.structure_size));
  source.read(header_size, bytes);
  structure = bytes;
  data_offset_ = header.data_offset;
  data_size = header.data_size;
  file_size = size;
  checksum = header.checksum;
  if (!verify_checksum)
    return;
  const auto fits = [this, header] { return compute_checksum(header, structure, source_) == header.checksum; };
  if (size >= large) {
    try {
      checksum_fits_ = std::async(std::launch::async, fits);
      return;
    } catch (const std::system_error&) { // the system gives no more threads
    }
  }
  checksum_fits_ = std::async(std::launch::deferred, fits);
}

void Container::check_checksum() const {
  check_file(
      !checksum_fits_.valid() || checksum_fits_.get(),
      "The program is damaged: its checksum does not fit. Copy or download it again, or compile the model again.");
}

} // namespace lapilli
