// The devices that Vulkan offers.
#pragma once

#include "hal/driver.h"

namespace lapilli::vulkan {

// There is one driver with and one without validation. They are made when first needed and live as long as the process:
// drivers do not like to be torn down while it ends.
hal::Driver* find_driver(bool validation); // null where there is no device: then the next call looks again
hal::Driver& get_driver(bool validation);  // throws where there is no device

// A device that the application has; the same one for the same handle.
std::shared_ptr<hal::Device> take_device(const lapilli_vulkan& given);

// True when the environment variable LAPILLI_VALIDATION asks for validation.
bool validation_by_environment();

} // namespace lapilli::vulkan
