#include "platform.h"

#include "error.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#if defined(_WIN32)
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace lapilli {

#if defined(_WIN32)

MappedFile::MappedFile(const char* path) {
  const HANDLE file =
      CreateFileW(std::filesystem::path(reinterpret_cast<const char8_t*>(path)).c_str(), GENERIC_READ,
                  FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE)
    fail(LAPILLI_IO_ERROR, "Cannot open ", path, " (Windows error ", GetLastError(), ").");
  LARGE_INTEGER size{};
  GetFileSizeEx(file, &size);
  size_ = static_cast<size_t>(size.QuadPart);
  if (size_ > 0) {
    const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
    if (mapping != nullptr) {
      data_ = static_cast<const std::byte*>(MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0));
      CloseHandle(mapping);
    }
  }
  CloseHandle(file);
  if (size_ > 0 && data_ == nullptr)
    fail(LAPILLI_IO_ERROR, "Cannot map ", path, " into memory (Windows error ", GetLastError(), ").");
}

MappedFile::~MappedFile() {
  if (data_ != nullptr)
    UnmapViewOfFile(data_);
}

void release_pages(Bytes) {} // the system trims mapped pages by itself

void* open_library(const char* name) { return reinterpret_cast<void*>(LoadLibraryA(name)); }

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

static unsigned long process_id() { return GetCurrentProcessId(); }

#else

MappedFile::MappedFile(const char* path) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    fail(LAPILLI_IO_ERROR, "Cannot open ", path, ": ", std::strerror(errno), ".");
  struct stat status{};
  const bool known = fstat(file, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    close(file);
    fail(LAPILLI_IO_ERROR, "Cannot read ", path, ": it is not a regular file.");
  }
  size_ = static_cast<size_t>(status.st_size);
  if (size_ > 0) {
    void* data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED) {
      const int reason = errno;
      close(file);
      fail(reason == ENOMEM ? LAPILLI_OUT_OF_MEMORY : LAPILLI_IO_ERROR, "Cannot map ", path, " (", human_size(size_),
           ") into memory: ", std::strerror(reason), ".");
    }
    data_ = static_cast<const std::byte*>(data);
  }
  close(file);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr)
    munmap(const_cast<std::byte*>(data_), size_);
}

void release_pages(Bytes bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size()) / page * page;
  if (first < last)
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void* open_library(const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

static long process_id() { return getpid(); }

#endif

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0')
    return std::nullopt;
  return value;
}

std::filesystem::path cache_folder() {
  if (const auto folder = environment("LAPILLI_CACHE_DIR"))
    return *folder;
#if defined(_WIN32)
  if (const auto folder = environment("LOCALAPPDATA"))
    return std::filesystem::path(*folder) / "lapilli";
#else
  if (const auto folder = environment("XDG_CACHE_HOME"))
    return std::filesystem::path(*folder) / "lapilli";
  if (const auto folder = environment("HOME"))
    return std::filesystem::path(*folder) / ".cache" / "lapilli";
#endif
  return {};
}

bool replace_file(const std::filesystem::path& path, std::span<const Bytes> parts) {
  static std::atomic<unsigned> counter{0};
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  std::filesystem::path temporary = path;
  temporary += cat(".", process_id(), ".", counter++, ".tmp");
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    for (const Bytes part : parts)
      file.write(reinterpret_cast<const char*>(part.data()), static_cast<std::streamsize>(part.size()));
    file.close();
    if (!file) {
      std::filesystem::remove(temporary, error);
      return false;
    }
  }
  std::filesystem::rename(temporary, path, error);
  if (!error)
    return true;
  std::filesystem::remove(temporary, error);
  return false;
}

uint64_t nanoseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

} // namespace lapilli
