// XXH64, the 64-bit hash of Yann Collet's xxHash (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lapilli {

// Fed in pieces of any size.
class Xxh64 {
public:
  explicit Xxh64(uint64_t seed);
  void update(const void* data, size_t size);
  uint64_t digest() const;

private:
  uint64_t seed_;
  uint64_t total_ = 0;
  std::array<uint64_t, 4> lanes_;
  std::array<std::byte, 32> rest_{};
  size_t rest_size_ = 0;
};

uint64_t xxh64(const void* data, size_t size, uint64_t seed);

} // namespace lapilli
