// The devices of this machine that programs and streams run on.
#pragma once

#include "hal/driver.h"
#include "lapilli.h"

namespace lapilli {

hal::Driver* find_driver(); // null where there is no device

// The one that the options name, or the environment. Throws NO_DRIVER or NO_DEVICE.
std::shared_ptr<hal::Device> open_device(const lapilli_load_options& options);

} // namespace lapilli
