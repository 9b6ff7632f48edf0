// The verification of kernels, and the rewriting of those that it takes. The kernel is told to be what its code says.

#include "base/error.h"
#include "format/spirv.h"
#include "format/spirv_clamp.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lapilli::Kernel kernel{};
  kernel.name = "fuzzed";
  kernel.code.resize(size / 4);
  if (size >= 4)
    std::memcpy(kernel.code.data(), data, size / 4 * 4);
  kernel.bindings = 8;
  kernel.types.assign(8, lapilli::BindingType::storage);
  kernel.types[7] = lapilli::BindingType::texel_float32;
  kernel.push_size = 128;
  kernel.shared_size = 32768;
  kernel.local = {64, 1, 1};
  try {
    lapilli::verify_spirv(kernel);
  } catch (const lapilli::Error&) {
    return 0;
  }
  // What is rewritten is as good as what it was.
  kernel.code = lapilli::clamp_indices(kernel.code);
  kernel.capabilities.clear();
  kernel.entry_point.clear();
  lapilli::verify_spirv(kernel);
  return 0;
}
