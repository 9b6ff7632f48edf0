// How inputs reach the kernels and outputs the host. The environment variables LAPILLI_INPUT_PATH and LAPILLI_OUTPUT_PATH override
// the choice for measurements.
#pragma once

#include "hal/capabilities.h"

namespace lapilli {

enum class InputPath {
  bar,     // the host writes into device memory
  staging, // host memory, copied by the device
  direct,  // kernels read host memory
};
enum class OutputPath {
  direct,  // kernels write host memory, where none of them reads it
  staging, // device memory, copied to the host's by the device
};
struct Paths {
  InputPath input;
  OutputPath output;
};
Paths choose_paths(const hal::Capabilities& device);
const char* name_of(InputPath path);
const char* name_of(OutputPath path);

} // namespace lapilli
