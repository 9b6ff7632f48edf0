// The driver's pipeline cache on disk: one file per device and driver, replaced in one step. A file that is damaged, of
// another driver or another user, or that others may write, is ignored.
#pragma once

#include "capabilities.h"

#include <filesystem>

namespace lapilli {

std::filesystem::path pipeline_cache_file(const std::filesystem::path& folder, const Capabilities& device);

// Empty when there is no usable file.
std::vector<std::byte> read_pipeline_cache(const std::filesystem::path& file, const Capabilities& device);

// False when it cannot be written, which is no error: the next load is only slower.
bool write_pipeline_cache(const std::filesystem::path& file, const Capabilities& device, Bytes data);

} // namespace lapilli
