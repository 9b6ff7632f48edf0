#include "base/private_file.h"

#include "base/text.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <utility>

#if defined(_WIN32)
#include <fstream>
#include <process.h>
#else
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace lapilli {

namespace {

namespace fs = std::filesystem;

#if defined(_WIN32)

long process_id() { return _getpid(); }

// Folders of a user are closed to others by the system.
bool write_new(const fs::path& path, std::span<const Bytes> parts) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (const Bytes part : parts)
    file.write(reinterpret_cast<const char*>(part.data()), static_cast<std::streamsize>(part.size()));
  file.close();
  return static_cast<bool>(file);
}

void make_folders(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
}

bool is_ours(const fs::path&) { return true; }

#else

long process_id() { return getpid(); }

class Handle {
public:
  explicit Handle(int handle) : handle_(handle) {}
  ~Handle() { close(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool is_open() const { return handle_ >= 0; }
  bool close() {
    const int handle = std::exchange(handle_, -1);
    return handle < 0 || ::close(handle) == 0;
  }
  // As many bytes as there are.
  bool read(std::span<std::byte> to) const {
    return all(to, [&](std::byte* data, size_t size) { return ::read(handle_, data, size); });
  }
  bool write(Bytes from) const {
    return all(from, [&](const std::byte* data, size_t size) { return ::write(handle_, data, size); });
  }
  bool status(struct stat& status) const { return fstat(handle_, &status) == 0; }

private:
  template <class Span, class Call> static bool all(Span bytes, Call&& call) {
    while (!bytes.empty()) {
      const ssize_t done = call(bytes.data(), bytes.size());
      if (done < 0 && errno == EINTR)
        continue;
      if (done <= 0)
        return false;
      bytes = bytes.subspan(static_cast<size_t>(done));
    }
    return true;
  }

  int handle_;
};

bool write_new(const fs::path& path, std::span<const Bytes> parts) {
  // Nothing that is there already is opened, be it a link to somewhere else.
  Handle file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file.is_open())
    return false;
  bool good = true;
  for (const Bytes part : parts)
    good = good && file.write(part);
  return file.close() && good;
}

void make_folders(const fs::path& path) {
  if (path.empty() || mkdir(path.c_str(), S_IRWXU) == 0 || errno != ENOENT || path == path.parent_path())
    return;
  make_folders(path.parent_path());
  mkdir(path.c_str(), S_IRWXU);
}

bool is_ours(const fs::path& path) {
  struct stat status{};
  return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid();
}

#endif

void remove_quietly(const fs::path& path) {
  std::error_code error;
  fs::remove(path, error);
}

// Of processes that ended while they wrote: a file is written within seconds.
void sweep(const fs::path& path) {
  constexpr auto old = std::chrono::hours(1);
  const std::string begin = path.filename().string() + ".";
  std::error_code error;
  for (fs::directory_iterator entry(path.parent_path(), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(begin) || !name.ends_with(".tmp") || !is_ours(entry->path()))
      continue;
    std::error_code unknown;
    const auto written = fs::last_write_time(entry->path(), unknown);
    if (!unknown && fs::file_time_type::clock::now() - written > old)
      remove_quietly(entry->path());
  }
}

} // namespace

#if defined(_WIN32)

std::vector<std::byte> read_private_file(const fs::path& path, uint64_t largest) {
  std::error_code error;
  const uint64_t size = fs::file_size(path, error);
  if (error || size == 0 || size > largest)
    return {};
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size())))
    return {};
  return bytes;
}

#else

std::vector<std::byte> read_private_file(const fs::path& path, uint64_t largest) {
  const Handle file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status{};
  if (!file.is_open() || !file.status(status) || !S_ISREG(status.st_mode) || status.st_uid != geteuid() ||
      (status.st_mode & (S_IWGRP | S_IWOTH)) != 0 || status.st_size <= 0 ||
      static_cast<uint64_t>(status.st_size) > largest)
    return {};
  std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
  if (!file.read(bytes))
    return {};
  return bytes;
}

#endif

bool replace_private_file(const fs::path& path, std::span<const Bytes> parts) {
  static std::atomic<unsigned> counter{0};
  make_folders(path.parent_path());
  sweep(path);
  constexpr int tries = 4; // where such a name is taken
  for (int i = 0; i < tries; ++i) {
    fs::path temporary = path;
    temporary += cat(".", process_id(), ".", counter++, ".tmp");
    std::error_code error;
    if (fs::exists(fs::symlink_status(temporary, error)))
      continue;
    if (write_new(temporary, parts)) {
      fs::rename(temporary, path, error);
      if (!error)
        return true;
    }
    if (is_ours(temporary))
      remove_quietly(temporary);
    return false;
  }
  return false;
}

} // namespace lapilli
