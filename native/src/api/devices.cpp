#include "api/devices.h"

#include "hal/vulkan/driver.h"

namespace lapilli {

hal::Driver* find_driver() { return vulkan::find_driver(vulkan::validation_by_environment()); }

std::shared_ptr<hal::Device> open_device(const lapilli_load_options& options) {
  if (options.vulkan != nullptr)
    return vulkan::take_device(*options.vulkan);
  hal::Driver& driver = vulkan::get_driver(options.validation != 0 || vulkan::validation_by_environment());
  return driver.open(driver.select(options.device));
}

} // namespace lapilli
