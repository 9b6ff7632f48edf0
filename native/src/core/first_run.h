// The first-run check: whether a device computes by its best plans what it computes by its plainest ones.
//
// Drivers miscompile kernels now and then, without a word. The plans of a program compute the same by different kernels: tiles in
// shared memory and subgroups, or plain loops. So the last plan that a device takes is the reference; no other device and no
// compiler is needed. What is wrong in both alike is not found.
#pragma once

#include "core/program.h"

namespace lapilli {

// As Program::load. Unless the cache folder says what was found before, every method whose sizes are known is run on random inputs,
// three times by the plans that the device takes and by the plainest ones. Where results differ by more than rounding, or from run to
// run, the plainest plans are taken, and Program::warning() says so. Throws NO_DEVICE where these are not repeatable either, or the
// plan was chosen by name. Needs no more device memory at a time than one of the plans.
std::shared_ptr<Program> load_checked(const Source& file, const lapilli_load_options& options, uint64_t started,
                                      const OpenDevice& open);

} // namespace lapilli
