// NaN, infinity, signed zeros and denormals: what a device's compiler is told to keep.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lapilli {

// Which promises (SPV_KHR_float_controls) the device makes, for 32-bit and 16-bit floats.
struct FloatControls {
  bool special_32 = false, special_16 = false;   // SignedZeroInfNanPreserve
  bool denormal_32 = false, denormal_16 = false; // DenormPreserve
  bool together = true;                          // denormals of all widths are kept, or of none

  bool any() const { return special_32 || special_16 || denormal_32 || denormal_16; }
};

// A module (verified: its instructions are whole) whose entry points ask for these promises. Without them a compiler may take
// NaN and infinity for impossible. A module that says something about denormals or NaN itself stays as it is.
std::vector<uint32_t> with_float_controls(std::span<const uint32_t> module, const FloatControls& controls);

} // namespace lapilli
