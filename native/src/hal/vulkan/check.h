// What Vulkan's functions return.
#pragma once

#include "vulkan_api.h"

namespace lapilli::vulkan {

// Throws an Error for every result that is not a success: OUT_OF_MEMORY, DEVICE_LOST, or INTERNAL with the name of
// `call`.
void check(VkResult result, const char* call);

} // namespace lapilli::vulkan
