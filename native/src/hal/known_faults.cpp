#include "hal/known_faults.h"

#include "base/platform.h"

#include <array>

namespace lapilli::hal {

namespace {

template <class... F> constexpr uint64_t bits(F... features) { return (static_cast<uint64_t>(features) | ...); }

constexpr uint32_t qualcomm = 0x5143, amd = 0x1002, mesa = 0x10005;
constexpr uint64_t matrices = bits(Feature::cooperative_matrix, Feature::bfloat16_matrix, Feature::int8_matrix);

constexpr std::array faults{
    KnownFault{"llvmpipe-arm64-halves", mesa, "llvmpipe", "Mesa 22.", 0, Architecture::arm64,
               bits(Feature::storage_16bit, Feature::float16), true, false,
               "Conversions from 16-bit floats end the process: LLVM cannot select ushl for four of them.",
               "found here, by tools/arm64_models.py with Debian's Mesa 22.3.6 and LLVM 15"},
    KnownFault{"adreno-matrices", qualcomm, "", "", 0, Architecture::any, matrices, false, false,
               "Products by cooperative matrices are wrong or slow.", "ncnn, pull request 6719, which does without"},
    KnownFault{
        "adreno-barriers", qualcomm, "", "", 0, Architecture::any, 0, false, true,
        "Barriers that only order reads before writes are dropped: results are now and then those of other data.",
        "ExecuTorch, commit e500fee6, for Adreno 840 and others"},
    KnownFault{"rdna2-matrices", amd, "RX 6", "", 0, Architecture::any, matrices, false, false,
               "Cooperative matrices are emulated, and slower than none.", "ncnn, issue 6504, which does without"},
};

bool has_part(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

} // namespace

std::span<const KnownFault> known_faults() { return faults; }

std::vector<const KnownFault*> faults_of(const Capabilities& device, Architecture machine) {
  std::vector<const KnownFault*> found;
  for (const KnownFault& fault : faults)
    if ((fault.vendor == 0 || fault.vendor == device.vendor_id) && has_part(device.name, fault.device) &&
        has_part(device.driver, fault.driver) && (fault.fixed_in == 0 || device.driver_version < fault.fixed_in) &&
        (fault.architecture == Architecture::any || fault.architecture == machine))
      found.push_back(&fault);
  return found;
}

void withhold_known_faults(Capabilities& device) {
  if (const auto wanted = environment("LAPILLI_KNOWN_FAULTS"); wanted && *wanted == "0")
    return;
  for (const KnownFault* fault : faults_of(device, here)) {
    device.features &= ~fault->withheld;
    device.no_half_conversions |= fault->no_half_conversions;
    device.full_barriers |= fault->full_barriers;
    device.known_faults.emplace_back(fault->name);
  }
}

} // namespace lapilli::hal
