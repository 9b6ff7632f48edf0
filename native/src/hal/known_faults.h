// Faults of drivers that are known, and what is not used for it. A device then looks as if it lacked that, so that plans without it are
// taken. The first-run check finds those that nobody has written down.
#pragma once

#include "hal/capabilities.h"

#include <string_view>

namespace lapilli::hal {

enum class Architecture { any, arm64 };
constexpr Architecture here =
#if defined(__aarch64__) || defined(_M_ARM64)
    Architecture::arm64;
#else
    Architecture::any;
#endif

struct KnownFault {
  std::string_view name; // for people and LAPILLI_KNOWN_FAULTS
  // Whom it concerns; empty, 0 or any: all.
  uint32_t vendor;
  std::string_view device; // a part of the device's name
  std::string_view driver; // a part of the driver's name and version
  uint32_t fixed_in;       // the driver version, as the driver encodes it, without the fault; 0: none is known
  Architecture architecture;
  uint64_t withheld;        // Feature bits
  bool no_half_conversions; // kernels that pack or unpack 16-bit floats are refused
  bool full_barriers;       // waiting takes memory with it, even where only the order of reads before writes matters
  std::string_view symptom, source;
};

std::span<const KnownFault> known_faults();

// The faults of a device on a machine, in the order of the table.
std::vector<const KnownFault*> faults_of(const Capabilities& device, Architecture machine);

// Takes away what those faults concern, and remembers their names. LAPILLI_KNOWN_FAULTS=0: nothing, to see whether a driver still has them.
void withhold_known_faults(Capabilities& device);

} // namespace lapilli::hal
