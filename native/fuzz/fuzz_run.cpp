// Loading and running on the first device, which should be lavapipe. Kernels that the verification takes must not crash it.

#include "fuzz.h"

#include <algorithm>

namespace {

uint64_t bytes_of(const lapilli_tensor& tensor) {
  constexpr uint64_t sizes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  uint64_t bytes = sizes[std::min<uint32_t>(tensor.dtype, 9)];
  for (uint32_t axis = 0; axis < tensor.rank; ++axis)
    bytes =
        std::min<uint64_t>(bytes * static_cast<uint64_t>(std::clamp<int64_t>(tensor.shape[axis], 0, 1 << 20)), 1 << 26);
  return bytes;
}

void run(lapilli_program* program, uint32_t method, int64_t size) {
  lapilli_method_info info;
  expect(lapilli_method(program, method, &info), {LAPILLI_OK});
  std::vector<lapilli_tensor> inputs(info.inputs), outputs(info.outputs);
  std::vector<std::vector<uint8_t>> memory;
  for (uint32_t i = 0; i < info.inputs; ++i) {
    lapilli_spec spec;
    expect(lapilli_input_spec(program, method, i, &spec), {LAPILLI_OK});
    inputs[i].rank = spec.rank;
    inputs[i].dtype = spec.dtype;
    for (uint32_t axis = 0; axis < spec.rank; ++axis)
      inputs[i].shape[axis] = spec.shape[axis] >= 0 ? spec.shape[axis] : std::max(spec.min[axis], size);
    inputs[i].size = bytes_of(inputs[i]);
    memory.emplace_back(inputs[i].size, uint8_t{1});
    inputs[i].data = memory.back().data();
  }
  const auto call = [&] {
    return lapilli_run_sync(program, method, inputs.data(), info.inputs, outputs.data(), info.outputs);
  };
  lapilli_status status = call(); // says how large the outputs are
  for (lapilli_tensor& output : outputs) {
    if (output.size > 1 << 26)
      return;
    memory.emplace_back(output.size);
    output.data = memory.back().data();
  }
  if (status == LAPILLI_INVALID_ARGUMENT)
    status = call();
  expect(status, {LAPILLI_OK, LAPILLI_INVALID_FILE, LAPILLI_OUT_OF_MEMORY, LAPILLI_INVALID_ARGUMENT, LAPILLI_NO_DEVICE,
                  LAPILLI_TIMEOUT, LAPILLI_OUT_OF_RANGE});
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const File file = repaired(data, size);
  if (file.empty())
    return 0;
  lapilli_limits limits{};
  limits.struct_size = sizeof limits;
  limits.device_bytes = uint64_t{256} << 20;
  limits.groups = 4096;
  lapilli_load_options options{};
  options.cache_dir = "";
  options.limits = &limits;
  lapilli_program* program = nullptr;
  const lapilli_status status = lapilli_load_memory(file.data(), file.size(), &options, &program);
  expect(status, {LAPILLI_OK, LAPILLI_INVALID_FILE, LAPILLI_OUT_OF_MEMORY, LAPILLI_NO_DEVICE, LAPILLI_UNSUPPORTED});
  if (status != LAPILLI_OK)
    return 0;
  for (uint32_t method = 0; method < std::min(lapilli_method_count(program), 4u); ++method)
    for (const int64_t n : {int64_t{3}, int64_t{1}})
      run(program, method, n);
  lapilli_destroy(program);
  return 0;
}
