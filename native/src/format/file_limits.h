// What a file may cost; see lapilli_limits.
#pragma once

#include "lapilli.h"

#include <cstddef>

namespace lapilli {

struct Limits {
  uint64_t structure_bytes = uint64_t{64} << 20;
  uint64_t code_bytes = uint64_t{256} << 20;
  uint64_t entries = uint64_t{4} << 20;
  uint64_t expressions = uint64_t{1} << 20;
  uint64_t description_bytes = uint64_t{64} << 20;
  uint64_t device_bytes = UINT64_MAX; // as much as the device has
  uint64_t groups = uint64_t{1} << 30;
  uint64_t run_nanoseconds = UINT64_MAX;

  // Null: the defaults. A caller that was compiled for an older player gives fewer fields.
  static Limits of(const lapilli_limits* given);
};

// Those that no caller changes.
inline constexpr size_t longest_name = 64 << 10;
inline constexpr size_t longest_symbol = 256;
inline constexpr size_t max_methods = 1024;
inline constexpr size_t max_plans = 64;     // of a method
inline constexpr size_t max_symbols = 1024; // of a method
inline constexpr size_t max_tensors = 4096; // inputs of a method, and outputs
inline constexpr size_t max_states = 16384;
inline constexpr size_t max_kernels = 65536;
inline constexpr size_t max_commands = 65536; // of a plan, at load and in a run
inline constexpr size_t max_buffers = 32768;  // of a plan
inline constexpr uint64_t max_padding = 4096; // bytes by which a buffer may be larger than the tensor that is in it

} // namespace lapilli
