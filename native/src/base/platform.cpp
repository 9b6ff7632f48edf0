#include "base/platform.h"

#include "base/error.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#if defined(_WIN32)
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <filesystem>
#include <windows.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace lapilli {

namespace {

[[noreturn]] void became_shorter(const std::string& path) {
  invalid_file("The file ", path, " became shorter while it was read. Wait until it is written, and load it again.");
}

} // namespace

#if defined(_WIN32)

File::File(const char* path) : path_(path) {
  const HANDLE file =
      CreateFileW(std::filesystem::path(reinterpret_cast<const char8_t*>(path)).c_str(), GENERIC_READ,
                  FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE)
    fail(LAPILLI_IO_ERROR, "Cannot open ", path, " (Windows error ", GetLastError(), ").");
  LARGE_INTEGER size{};
  if (GetFileType(file) != FILE_TYPE_DISK || GetFileSizeEx(file, &size) == 0) {
    CloseHandle(file);
    fail(LAPILLI_IO_ERROR, "Cannot read ", path, ": it is not a regular file.");
  }
  handle_ = reinterpret_cast<intptr_t>(file);
  size_ = static_cast<uint64_t>(size.QuadPart);
}

File::~File() { CloseHandle(reinterpret_cast<HANDLE>(handle_)); }

void File::read(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    OVERLAPPED place{};
    place.Offset = static_cast<DWORD>(offset);
    place.OffsetHigh = static_cast<DWORD>(offset >> 32);
    DWORD count = 0;
    const auto wanted = static_cast<DWORD>(std::min<size_t>(to.size(), size_t{1} << 30));
    if (ReadFile(reinterpret_cast<HANDLE>(handle_), to.data(), wanted, &count, &place) == 0 &&
        GetLastError() != ERROR_HANDLE_EOF)
      fail(LAPILLI_IO_ERROR, "Cannot read ", path_, " (Windows error ", GetLastError(), ").");
    if (count == 0)
      became_shorter(path_);
    offset += count;
    to = to.subspan(count);
  }
}

// From the system's folder alone: what lies beside the program or in the current folder is not asked.
void* open_library(const char* name) {
  return reinterpret_cast<void*>(LoadLibraryExA(name, nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32));
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

#else

File::File(const char* path) : path_(path) {
  const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe without a writer must not block
  if (file < 0)
    fail(LAPILLI_IO_ERROR, "Cannot open ", path, ": ", std::strerror(errno), ".");
  struct stat status{};
  const bool known = fstat(file, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    close(file);
    fail(LAPILLI_IO_ERROR, "Cannot read ", path, ": it is not a regular file.");
  }
  handle_ = file;
  size_ = static_cast<uint64_t>(status.st_size);
}

File::~File() { close(static_cast<int>(handle_)); }

void File::read(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t count = pread(static_cast<int>(handle_), to.data(), std::min<size_t>(to.size(), size_t{1} << 30),
                                static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      fail(LAPILLI_IO_ERROR, "Cannot read ", path_, ": ", std::strerror(errno), ".");
    if (count == 0)
      became_shorter(path_);
    offset += static_cast<uint64_t>(count);
    to = to.subspan(static_cast<size_t>(count));
  }
}

void* open_library(const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

#endif

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0')
    return std::nullopt;
  return value;
}

std::string cache_folder() {
  if (const auto folder = environment("LAPILLI_CACHE_DIR"))
    return *folder;
#if defined(_WIN32)
  if (const auto folder = environment("LOCALAPPDATA"))
    return path_in(*folder, "lapilli");
#else
  if (const auto folder = environment("XDG_CACHE_HOME"))
    return path_in(*folder, "lapilli");
  if (const auto folder = environment("HOME"))
    return path_in(*folder, ".cache/lapilli");
#endif
  return {};
}

std::string path_in(const std::string& folder, std::string_view name) {
  std::string path = folder;
  if (!path.ends_with('/'))
    path += '/';
  path += name;
  return path;
}

uint64_t nanoseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

} // namespace lapilli
