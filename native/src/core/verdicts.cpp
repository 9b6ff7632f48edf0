#include "core/verdicts.h"

#include "base/private_file.h"
#include "base/text.h"
#include "core/program.h"
#include "format/checksum.h"

#include <array>
#include <cstring>

namespace lapilli {

namespace {

constexpr uint32_t version = 1; // of the check: another one judges anew
constexpr uint64_t largest = uint64_t{1} << 16;
constexpr size_t head = sizeof(uint64_t) + 1; // a checksum, and the finding

std::string identity(const Program& program, bool by_name) {
  const Model& model = program.model();
  const hal::Capabilities& device = program.device().capabilities;
  std::string text = cat(version, by_name ? '!' : '\n', model.file_size, '\n', model.checksum, '\n',
                         hal::uuid_text(device), '\n', device.name, '\n', device.vendor_id, '\n', device.device_id,
                         '\n', device.driver, '\n', device.driver_version, '\n');
  for (uint32_t m = 0; m < model.methods.size(); ++m)
    text += cat(program.plan(m).name, '\n');
  return text;
}

std::string hex(uint64_t number) {
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4)
    text += "0123456789abcdef"[number >> shift & 15];
  return text;
}

uint64_t checksum(uint64_t key, uint8_t finding, std::string_view why) {
  Xxh64 hash(key);
  hash.update(&finding, 1);
  hash.update(why.data(), why.size());
  return hash.digest();
}

} // namespace

VerdictFile::VerdictFile(const std::string& folder, const Program& program, bool by_name) {
  if (folder.empty())
    return;
  const std::string text = identity(program, by_name);
  key_ = xxh64(text.data(), text.size(), 1);
  path_ = path_in(folder, "verdicts/" + hex(xxh64(text.data(), text.size(), 0)) + hex(key_));
}

std::optional<Verdict> VerdictFile::read() const {
  if (path_.empty())
    return std::nullopt;
  const std::vector<std::byte> bytes = read_private_file(path_, largest);
  if (bytes.size() < head)
    return std::nullopt;
  uint64_t sum = 0;
  std::memcpy(&sum, bytes.data(), sizeof sum);
  const auto finding = static_cast<uint8_t>(bytes[sizeof sum]);
  std::string why(reinterpret_cast<const char*>(bytes.data()) + head, bytes.size() - head);
  if (sum != checksum(key_, finding, why) || finding > static_cast<uint8_t>(Finding::refused))
    return std::nullopt;
  return Verdict{static_cast<Finding>(finding), std::move(why)};
}

void VerdictFile::write(const Verdict& verdict) const {
  if (path_.empty())
    return;
  const auto finding = static_cast<uint8_t>(verdict.finding);
  const uint64_t sum = checksum(key_, finding, verdict.why);
  const std::array<Bytes, 3> parts{std::as_bytes(std::span(&sum, 1)), std::as_bytes(std::span(&finding, 1)),
                                   std::as_bytes(std::span(verdict.why))};
  replace_private_file(path_, parts);
}

} // namespace lapilli
