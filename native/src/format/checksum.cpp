#include "format/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lapilli {

namespace {

constexpr uint64_t prime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t prime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t prime3 = 0x165667B19E3779F9u;
constexpr uint64_t prime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t prime5 = 0x27D4EB2F165667C5u;

static_assert(std::endian::native == std::endian::little, "files and hashes are little-endian");

uint64_t read64(const std::byte* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint32_t read32(const std::byte* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint64_t round(uint64_t lane, uint64_t input) { return std::rotl(lane + input * prime2, 31) * prime1; }

uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * prime1 + prime4; }

void consume(std::array<uint64_t, 4>& lanes, const std::byte* p) {
  for (size_t i = 0; i < 4; ++i)
    lanes[i] = round(lanes[i], read64(p + 8 * i));
}

} // namespace

Xxh64::Xxh64(uint64_t seed) : seed_(seed), lanes_{seed + prime1 + prime2, seed + prime2, seed, seed - prime1} {}

void Xxh64::update(const void* data, size_t size) {
  const auto* p = static_cast<const std::byte*>(data);
  if (size == 0)
    return;
  total_ += size;
  if (rest_size_ > 0) {
    const size_t taken = std::min(rest_.size() - rest_size_, size);
    std::memcpy(rest_.data() + rest_size_, p, taken);
    rest_size_ += taken;
    p += taken;
    size -= taken;
    if (rest_size_ < rest_.size())
      return;
    consume(lanes_, rest_.data());
    rest_size_ = 0;
  }
  auto lanes = lanes_; // in registers
  for (; size >= 32; p += 32, size -= 32)
    consume(lanes, p);
  lanes_ = lanes;
  if (size > 0)
    std::memcpy(rest_.data(), p, size);
  rest_size_ = size;
}

uint64_t Xxh64::digest() const {
  uint64_t hash = seed_ + prime5;
  if (total_ >= 32) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_)
      hash = merge(hash, lane);
  }
  hash += total_;
  const std::byte* p = rest_.data();
  size_t size = rest_size_;
  for (; size >= 8; p += 8, size -= 8)
    hash = std::rotl(hash ^ round(0, read64(p)), 27) * prime1 + prime4;
  for (; size >= 4; p += 4, size -= 4)
    hash = std::rotl(hash ^ (read32(p) * prime1), 23) * prime2 + prime3;
  for (; size > 0; ++p, --size)
    hash = std::rotl(hash ^ (static_cast<uint64_t>(*p) * prime5), 11) * prime1;
  hash = (hash ^ (hash >> 33)) * prime2;
  hash = (hash ^ (hash >> 29)) * prime3;
  return hash ^ (hash >> 32);
}

uint64_t xxh64(const void* data, size_t size, uint64_t seed) {
  Xxh64 hash(seed);
  hash.update(data, size);
  return hash.digest();
}

} // namespace lapilli
