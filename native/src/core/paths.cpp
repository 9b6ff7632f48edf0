#include "core/paths.h"

#include "base/error.h"
#include "base/platform.h"

namespace lapilli {

Paths choose_paths(const hal::Capabilities& device) {
  Paths paths{InputPath::direct, OutputPath::direct};
  if (device.is_discrete())
    paths.input = device.large_bar ? InputPath::bar : InputPath::staging;
  if (const auto wanted = environment("LAPILLI_INPUT_PATH")) {
    if (*wanted == "bar")
      paths.input = InputPath::bar;
    else if (*wanted == "staging")
      paths.input = InputPath::staging;
    else if (*wanted == "direct")
      paths.input = InputPath::direct;
    else
      fail(LAPILLI_INVALID_ARGUMENT, "LAPILLI_INPUT_PATH is \"", *wanted, "\"; it can be bar, staging or direct.");
  }
  if (const auto wanted = environment("LAPILLI_OUTPUT_PATH")) {
    if (*wanted == "staging")
      paths.output = OutputPath::staging;
    else if (*wanted != "direct")
      fail(LAPILLI_INVALID_ARGUMENT, "LAPILLI_OUTPUT_PATH is \"", *wanted, "\"; it can be staging or direct.");
  }
  return paths;
}

const char* name_of(InputPath path) {
  return path == InputPath::bar ? "bar" : path == InputPath::staging ? "staging" : "direct";
}

const char* name_of(OutputPath path) { return path == OutputPath::staging ? "staging" : "direct"; }

} // namespace lapilli
