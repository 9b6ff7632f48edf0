// A program inside a zip archive: what torch.jit.save writes is one, and its tensors are stored as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace lapilli {

struct FilePart {
  uint64_t offset = 0, size = 0;
};

// Copies bytes of the file from an offset on; all of them lie within it.
using ReadFile = std::function<void(uint64_t offset, std::span<std::byte> to)>;

// Where the program is: the whole file if it is no zip archive; else the one entry that is stored and begins like a program. The
// archive's directory is verified before it is used: at most 64 MiB, 262,144 entries. Throws INVALID_FILE if it is damaged, or has no
// program or several.
FilePart program_in_zip(uint64_t size, const ReadFile& read);

} // namespace lapilli
