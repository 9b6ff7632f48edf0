// What differs between operating systems: files, shared libraries, the environment, the cache folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace lapilli {

using Bytes = std::span<const std::byte>;

// A regular file, open for reading. It is read by calls, never mapped: a mapping of a file that becomes shorter meanwhile
// would end the process.
class File {
public:
  explicit File(const char* path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  uint64_t size() const { return size_; } // when it was opened
  // Throws INVALID_FILE when the file has become shorter than `offset + to.size()`.
  void read(uint64_t offset, std::span<std::byte> to) const;

private:
  std::string path_; // for messages
  intptr_t handle_ = -1;
  uint64_t size_ = 0;
};

// The memory of this process that holds a shared library's functions; null when there is no such library.
void* open_library(const char* name);
void* find_symbol(void* library, const char* name);

// A variable of the environment that is set and not empty.
std::optional<std::string> environment(const char* name);

// $LAPILLI_CACHE_DIR, else the user's cache folder for Lapilli; empty when there is none.
std::string cache_folder();

// The path of what a folder has. Paths are strings: `std::filesystem` would be a twentieth of the smallest player.
std::string path_in(const std::string& folder, std::string_view name);

uint64_t nanoseconds_now(); // monotonic

} // namespace lapilli
