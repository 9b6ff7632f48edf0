#include "base/private_file.h"

#include "base/text.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <utility>

#if defined(_WIN32)
#include <filesystem>
#include <fstream>
#include <process.h>
#else
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace lapilli {

namespace {

constexpr auto old = std::chrono::hours(1); // of what is left half written: a file is written within seconds

#if defined(_WIN32)

namespace fs = std::filesystem;

long process_id() { return _getpid(); }

// Folders of a user are closed to others by the system.
bool write_new(const std::string& path, std::span<const Bytes> parts) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (const Bytes part : parts)
    file.write(reinterpret_cast<const char*>(part.data()), static_cast<std::streamsize>(part.size()));
  file.close();
  return static_cast<bool>(file);
}

std::string parent_of(const std::string& path) { return fs::path(path).parent_path().string(); }

void make_folders(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
}

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

bool rename(const std::string& from, const std::string& to) {
  std::error_code error;
  fs::rename(from, to, error);
  return !error;
}

void remove_quietly(const std::string& path) {
  std::error_code error;
  fs::remove(path, error);
}

bool is_ours(const std::string&) { return true; }

bool is_old(const std::string& path) {
  std::error_code error;
  const auto written = fs::last_write_time(path, error);
  return !error && fs::file_time_type::clock::now() - written > old;
}

template <class Visit> void each_name(const std::string& folder, Visit&& visit) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    visit(entry->path().filename().string());
}

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

bool write_new(const std::string& path, std::span<const Bytes> parts) {
  // Nothing that is there already is opened, be it a link to somewhere else.
  Handle file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file.is_open())
    return false;
  bool good = true;
  for (const Bytes part : parts)
    good = good && file.write(part);
  return file.close() && good;
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return path.substr(0, slash == std::string::npos ? 0 : std::max<size_t>(slash, 1));
}

void make_folders(const std::string& path) {
  if (path.empty() || mkdir(path.c_str(), S_IRWXU) == 0 || errno != ENOENT || path == parent_of(path))
    return;
  make_folders(parent_of(path));
  mkdir(path.c_str(), S_IRWXU);
}

bool is_there(const std::string& path) {
  struct stat status{};
  return lstat(path.c_str(), &status) == 0;
}

bool rename(const std::string& from, const std::string& to) { return std::rename(from.c_str(), to.c_str()) == 0; }

void remove_quietly(const std::string& path) { std::remove(path.c_str()); }

bool is_ours(const std::string& path) {
  struct stat status{};
  return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid();
}

bool is_old(const std::string& path) {
  struct stat status{};
  const auto now = std::chrono::system_clock::now();
  return lstat(path.c_str(), &status) == 0 && now - std::chrono::system_clock::from_time_t(status.st_mtime) > old;
}

template <class Visit> void each_name(const std::string& folder, Visit&& visit) {
  DIR* entries = opendir(folder.empty() ? "." : folder.c_str());
  if (entries == nullptr)
    return;
  while (const dirent* entry = readdir(entries))
    visit(entry->d_name);
  closedir(entries);
}

#endif

// Of processes that ended while they wrote.
void sweep(const std::string& path) {
  const std::string folder = parent_of(path);
  const std::string begin = path.substr(path.find_last_of("/\\") + 1) + ".";
  each_name(folder, [&](const std::string& name) {
    const std::string file = folder.empty() ? name : path_in(folder, name);
    if (name.starts_with(begin) && name.ends_with(".tmp") && is_ours(file) && is_old(file))
      remove_quietly(file);
  });
}

} // namespace

#if defined(_WIN32)

std::vector<std::byte> read_private_file(const std::string& path, uint64_t largest) {
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

std::vector<std::byte> read_private_file(const std::string& path, uint64_t largest) {
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

bool replace_private_file(const std::string& path, std::span<const Bytes> parts) {
  static std::atomic<unsigned> counter{0};
  make_folders(parent_of(path));
  sweep(path);
  constexpr int tries = 4; // where such a name is taken
  for (int i = 0; i < tries; ++i) {
    const std::string temporary = cat(path, ".", process_id(), ".", counter++, ".tmp");
    if (is_there(temporary))
      continue;
    if (write_new(temporary, parts) && rename(temporary, path))
      return true;
    if (is_ours(temporary))
      remove_quietly(temporary);
    return false;
  }
  return false;
}

} // namespace lapilli
