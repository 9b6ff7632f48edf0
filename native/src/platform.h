// What differs between operating systems: mapped files, shared libraries, the environment, the cache folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

namespace lapilli {

using Bytes = std::span<const std::byte>;

// A file mapped read-only. Pages that were read can be given back before the mapping ends.
class MappedFile {
public:
  explicit MappedFile(const char* path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  Bytes bytes() const { return {data_, size_}; }

private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Tell the system that these bytes of a mapping are not needed in memory for now. They can still be read.
void release_pages(Bytes bytes);

// The memory of this process that holds a shared library's functions; null when there is no such library.
void* open_library(const char* name);
void* find_symbol(void* library, const char* name);

// A variable of the environment that is set and not empty.
std::optional<std::string> environment(const char* name);

// $LAPILLI_CACHE_DIR, else the user's cache folder for Lapilli; empty when there is none.
std::filesystem::path cache_folder();

// Replace a file in one step: readers see the old one or the new one. False when it cannot be written.
bool replace_file(const std::filesystem::path& path, std::span<const Bytes> parts);

uint64_t nanoseconds_now(); // monotonic

} // namespace lapilli
