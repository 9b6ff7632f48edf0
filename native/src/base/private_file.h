// Files that this user alone may have written, in folders where others may be: the pipeline cache goes to the driver, which
// believes what it reads.
#pragma once

#include "base/platform.h"

#include <vector>

namespace lapilli {

// Empty where there is no such file, it is no regular file of this user, others may write it, or it is larger than that.
std::vector<std::byte> read_private_file(const std::string& path, uint64_t largest);

// Replaces a file in one step: readers see the old one or the new one. The file is readable for this user alone, and so are
// folders that have to be made. What earlier processes left half written is removed. False when it cannot be written.
bool replace_private_file(const std::string& path, std::span<const Bytes> parts);

} // namespace lapilli
