#include "base/halves.h"

#include "base/parallel.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#ifdef _MSC_VER
#include <intrin.h>
#define LAPILLI_WITH_F16C // its intrinsics need no option
#else
#include <cpuid.h>
#define LAPILLI_WITH_F16C __attribute__((target("avx,f16c")))
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lapilli {

namespace {

void round_one_by_one(std::byte* to, const std::byte* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    const uint16_t half = half_of(value);
    std::memcpy(to + i * sizeof half, &half, sizeof half);
  }
}

#if defined(__x86_64__) || defined(_M_X64)

// Whether the processor converts, and the system keeps the registers for it.
bool has_f16c() {
  constexpr unsigned f16c = 1u << 29, avx = 1u << 28, xsave = 1u << 27, wanted = f16c | avx | xsave;
  unsigned registers[4] = {};
  uint64_t kept = 0;
#ifdef _MSC_VER
  __cpuid(reinterpret_cast<int*>(registers), 1);
  if ((registers[2] & wanted) == wanted)
    kept = _xgetbv(0);
#else
  if (__get_cpuid(1, &registers[0], &registers[1], &registers[2], &registers[3]) == 0)
    return false;
  if ((registers[2] & wanted) == wanted) {
    uint32_t low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    kept = low;
  }
#endif
  return (kept & 6) == 6; // the registers of SSE and AVX
}

// Rounds some of the first floats. Returns how many.
LAPILLI_WITH_F16C size_t round_with_f16c(std::byte* to, const std::byte* from, size_t count) {
  constexpr size_t lanes = 8;
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const __m256 values = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * sizeof(float)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * sizeof(uint16_t)),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return i;
}

size_t round_many(std::byte* to, const std::byte* from, size_t count) {
  static const bool f16c = has_f16c();
  return f16c ? round_with_f16c(to, from, count) : 0;
}

#elif defined(__aarch64__)

size_t round_many(std::byte* to, const std::byte* from, size_t count) {
  constexpr size_t lanes = 4;
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const float32x4_t values =
        vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from + i * sizeof(float))));
    vst1_u8(reinterpret_cast<uint8_t*>(to + i * sizeof(uint16_t)), vreinterpret_u8_f16(vcvt_f16_f32(values)));
  }
  return i;
}

#else

size_t round_many(std::byte*, const std::byte*, size_t) { return 0; }

#endif

} // namespace

uint16_t half_of(float value) {
  constexpr uint32_t infinity = 255u << 23, beyond = 143u << 23, least_normal = 113u << 23, rebias = 112u << 23;
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude >= beyond)
    half = magnitude > infinity ? 0x7e00 : 0x7c00;
  else if (magnitude < least_normal) // next to a half, floats have the steps of the smallest halves
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  else
    half = (magnitude - rebias + 0xfff + (magnitude >> 13 & 1)) >> 13;
  return static_cast<uint16_t>(sign | half);
}

void round_to_halves(void* to, const void* from, size_t count) {
  in_pieces(count, sizeof(float), [&](size_t first, size_t n) {
    std::byte* halves = static_cast<std::byte*>(to) + first * sizeof(uint16_t);
    const std::byte* floats = static_cast<const std::byte*>(from) + first * sizeof(float);
    const size_t done = round_many(halves, floats, n);
    round_one_by_one(halves + done * sizeof(uint16_t), floats + done * sizeof(float), n - done);
  });
}

} // namespace lapilli
