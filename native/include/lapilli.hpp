// Lapilli for C++17 and later: Program, Tensor, Run and Stream over the C ABI of lapilli.h. Nothing but the standard library.
//
//     auto x = lapilli::rand({1, 3, 224, 224});
//     auto program = lapilli::Program::load("model.lap");
//     auto y = program.forward({x.vulkan()}).cpu();
//
// Errors. Every function that can fail has two forms: `try_load` returns a Result, which has a value or a Failure (a status, and a
// sentence that says what was given, what is accepted and what to do); `load` returns the value or throws the same as an Error. With
// exceptions turned off (-fno-exceptions, or LAPILLI_EXCEPTIONS defined as 0) there are only the former.
//
// Objects are handles: a copy means the same program, tensor, run or stream, and the last one frees it. One that was moved from, or made
// without an argument, is empty: every call says so, none crashes. Tensors keep what they need alive, so a program or stream may go
// before its tensors.
//
// Threads. Calls of any objects may come from any threads at the same time, also those of the same program, run or stream. As with
// std::shared_ptr, assigning to one object while another thread uses that same object is a race: give each thread its own copy.
// Two threads that write the same host tensor, or one that writes it while another runs a program on it, race as with any memory.
#ifndef LAPILLI_HPP
#define LAPILLI_HPP

#include "lapilli.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__has_include)
#if __has_include(<version>)
#include <version>
#endif
#endif
#if defined(__cpp_lib_span)
#include <span>
#endif

#if !defined(LAPILLI_EXCEPTIONS)
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#define LAPILLI_EXCEPTIONS 1
#else
#define LAPILLI_EXCEPTIONS 0
#endif
#endif

namespace lapilli {
inline namespace v1 { // so that no name is one of the player's own, which a static library brings along

#if defined(__cpp_lib_span)
template <class T> using Span = std::span<T>;
#else
// As much of std::span as is needed here.
template <class T> class Span {
public:
  constexpr Span() = default;
  constexpr Span(T *data, size_t size) : data_(data), size_(size) {}
  template <class C, class P = decltype(std::declval<C &>().data()),
            class = std::enable_if_t<std::is_convertible<std::remove_pointer_t<P> (*)[], T (*)[]>::value>>
  constexpr Span(C &&from) : data_(from.data()), size_(from.size()) {}
  constexpr T *data() const { return data_; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr T *begin() const { return data_; }
  constexpr T *end() const { return data_ + size_; }
  constexpr T &operator[](size_t i) const { return data_[i]; }

private:
  T *data_ = nullptr;
  size_t size_ = 0;
};
#endif

enum class Status {
  ok = LAPILLI_OK,
  invalid_argument = LAPILLI_INVALID_ARGUMENT,
  invalid_file = LAPILLI_INVALID_FILE,
  io_error = LAPILLI_IO_ERROR,
  no_driver = LAPILLI_NO_DRIVER,
  no_device = LAPILLI_NO_DEVICE,
  out_of_memory = LAPILLI_OUT_OF_MEMORY,
  device_lost = LAPILLI_DEVICE_LOST,
  timeout = LAPILLI_TIMEOUT,
  internal = LAPILLI_INTERNAL,
  unsupported = LAPILLI_UNSUPPORTED,
  out_of_range = LAPILLI_OUT_OF_RANGE
};

enum class DType : uint32_t {
  boolean = LAPILLI_BOOL,
  uint8 = LAPILLI_UINT8,
  int8 = LAPILLI_INT8,
  int16 = LAPILLI_INT16,
  int32 = LAPILLI_INT32,
  int64 = LAPILLI_INT64,
  float16 = LAPILLI_FLOAT16,
  bfloat16 = LAPILLI_BFLOAT16,
  float32 = LAPILLI_FLOAT32,
  float64 = LAPILLI_FLOAT64
};

inline size_t size_of(DType dtype) {
  constexpr std::array<size_t, 10> sizes{1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  const auto index = static_cast<size_t>(dtype);
  return index < sizes.size() ? sizes[index] : 0; // 0: no dtype
}

inline const char *name_of(DType dtype) {
  constexpr std::array<const char *, 10> names{"bool",  "uint8",   "int8",     "int16",   "int32",
                                               "int64", "float16", "bfloat16", "float32", "float64"};
  const auto index = static_cast<size_t>(dtype);
  return index < names.size() ? names[index] : "an unknown dtype";
}

// 16-bit floats as they are in memory. They are converted explicitly, and rounded to the nearest, ties to even.
struct Half {
  uint16_t bits = 0;
  Half() = default;
  explicit Half(float value) : bits(from_float(value)) {}
  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, low = bits & 0x7fffu;
    uint32_t word = 0;
    if (low >= 0x7c00u) {
      word = sign | 0x7f800000u | (low & 0x3ffu) << 13;
    } else if (low >= 0x400u) {
      word = sign | ((low << 13) + 0x38000000u);
    } else {
      const float value = static_cast<float>(low) * (1.0f / 16777216.0f);
      return sign != 0 ? -value : value;
    }
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }

private:
  static uint16_t from_float(float value) {
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    const uint32_t sign = word >> 16 & 0x8000u, low = word & 0x7fffffffu;
    if (low > 0x7f800000u)
      return static_cast<uint16_t>(sign | 0x7e00u);
    if (low >= 0x477ff000u) // rounds to infinity
      return static_cast<uint16_t>(sign | 0x7c00u);
    if (low >= 0x38800000u)
      return static_cast<uint16_t>(sign | ((low - 0x38000000u + 0xfffu + (low >> 13 & 1u)) >> 13));
    if (low < 0x33000000u)
      return static_cast<uint16_t>(sign);
    const uint32_t shift = 126u - (low >> 23), mantissa = (low & 0x7fffffu) | 0x800000u;
    const uint32_t whole = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
    return static_cast<uint16_t>(sign | (whole + (rest > middle || (rest == middle && (whole & 1u) != 0) ? 1 : 0)));
  }
};

struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    bits = static_cast<uint16_t>(value != value ? word >> 16 | 0x40u : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

// The dtype of tensors whose elements are T in C++.
template <class T> constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  static_assert(std::is_same<U, bool>::value || std::is_same<U, Half>::value || std::is_same<U, BFloat16>::value ||
                    std::is_same<U, float>::value || std::is_same<U, double>::value ||
                    (std::is_integral<U>::value && (std::is_signed<U>::value || sizeof(U) == 1)),
                "Tensors have elements of bool, uint8_t, int8_t ... int64_t, lapilli::Half, lapilli::BFloat16, float or double.");
  if constexpr (std::is_same<U, bool>::value)
    return DType::boolean;
  else if constexpr (std::is_same<U, Half>::value)
    return DType::float16;
  else if constexpr (std::is_same<U, BFloat16>::value)
    return DType::bfloat16;
  else if constexpr (std::is_same<U, float>::value)
    return DType::float32;
  else if constexpr (std::is_same<U, double>::value)
    return DType::float64;
  else if constexpr (sizeof(U) == 8)
    return DType::int64;
  else if constexpr (sizeof(U) == 4)
    return DType::int32;
  else if constexpr (sizeof(U) == 2)
    return DType::int16;
  else
    return std::is_signed<U>::value ? DType::int8 : DType::uint8;
}

// -- errors

struct Failure {
  Status status = Status::ok;
  std::string message;
};

#if LAPILLI_EXCEPTIONS
class Error : public std::runtime_error {
public:
  explicit Error(const Failure &failure) : std::runtime_error(failure.message), status(failure.status) {}
  Status status;
};
#endif

// A value, or why there is none. Looking at a value that is not there throws the Error; without exceptions it gives an empty object, whose
// calls fail in turn.
template <class T> class [[nodiscard]] Result {
public:
  using value_type = T;
  Result(T value) : value_(std::move(value)) {}
  Result(Failure failure) : failure_(std::move(failure)) {}

  bool has_value() const { return failure_.status == Status::ok; }
  explicit operator bool() const { return has_value(); }
  const Failure &error() const { return failure_; } // of status ok where there is a value
  Status status() const { return failure_.status; }
  const T &value() const & { return look(), value_; }
  T &value() & { return look(), value_; }
  T &&value() && { return look(), std::move(value_); }
  T value_or(T other) const { return has_value() ? value_ : std::move(other); }
  const T &operator*() const & { return value(); }
  T &operator*() & { return value(); }
  T &&operator*() && { return std::move(*this).value(); }
  const T *operator->() const { return &value(); }
  T *operator->() { return &value(); }

private:
  void look() const {
#if LAPILLI_EXCEPTIONS
    if (!has_value())
      throw Error(failure_);
#endif
  }
  T value_{};
  Failure failure_;
};

template <> class [[nodiscard]] Result<void> {
public:
  using value_type = void;
  Result() = default;
  Result(Failure failure) : failure_(std::move(failure)) {}
  bool has_value() const { return failure_.status == Status::ok; }
  explicit operator bool() const { return has_value(); }
  const Failure &error() const { return failure_; }
  Status status() const { return failure_.status; }
  void value() const {
#if LAPILLI_EXCEPTIONS
    if (!has_value())
      throw Error(failure_);
#endif
  }

private:
  Failure failure_;
};

namespace detail {

inline Failure failed(lapilli_status status) { return {static_cast<Status>(status), lapilli_last_error()}; }
inline Failure invalid(std::string message) { return {Status::invalid_argument, std::move(message)}; }
inline Failure empty(const char *what) {
  return invalid(std::string("This lapilli::") + what +
                 " is empty: it was moved from, or made without an argument. Assign one to it before it is used.");
}

inline Failure out_of_memory() noexcept {
  Failure failure;
  failure.status = Status::out_of_memory;
#if LAPILLI_EXCEPTIONS
  try {
    failure.message = "The machine is out of memory. Close other programs, or run smaller inputs.";
  } catch (...) { // without words
  }
#endif
  return failure;
}

// What `f` returns, and a failure for what the standard library throws.
template <class F> auto guarded(F &&f) -> decltype(f()) {
#if LAPILLI_EXCEPTIONS
  try {
    return f();
  } catch (const std::bad_alloc &) {
  } catch (const std::length_error &) {
  }
  return out_of_memory();
#else
  return f();
#endif
}

struct ProgramHandle {
  lapilli_program *handle = nullptr;
  ProgramHandle() = default;
  ProgramHandle(const ProgramHandle &) = delete;
  ProgramHandle &operator=(const ProgramHandle &) = delete;
  ~ProgramHandle() { lapilli_destroy(handle); }
};

// The result of a method's checks of int64 values, on the device until somebody wants to know.
struct Check {
  lapilli_buffer *buffer = nullptr;
  std::shared_ptr<ProgramHandle> program;
  uint32_t method = 0;
};

struct StreamHandle {
  lapilli_stream *handle = nullptr;
  std::mutex mutex;
  std::vector<Check> checks;

  StreamHandle() = default;
  StreamHandle(const StreamHandle &) = delete;
  StreamHandle &operator=(const StreamHandle &) = delete;
  ~StreamHandle() {
    for (const Check &check : checks)
      lapilli_buffer_destroy(check.buffer);
    lapilli_stream_destroy(handle);
  }

  // Reads what the checks of earlier calls say; waits for them, if there are any. The first that failed is told, once.
  Result<void> look() {
    std::vector<Check> taken;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      taken.swap(checks);
    }
    Failure failure;
    for (const Check &check : taken) {
      int32_t value = 0;
      lapilli_status status = lapilli_buffer_read(check.buffer, 0, &value, sizeof value);
      if (status == LAPILLI_OK)
        status = lapilli_check_result(check.program->handle, check.method, value);
      if (status != LAPILLI_OK && failure.status == Status::ok)
        failure = failed(status);
      lapilli_buffer_destroy(check.buffer);
    }
    if (failure.status != Status::ok)
      return failure;
    return {};
  }
};

struct BufferHandle {
  lapilli_buffer *handle = nullptr;
  std::shared_ptr<StreamHandle> stream;
  // Of int64 values that the host wrote: the largest magnitude. Kernels compute them in 32 bits.
  std::atomic<int64_t> largest{0};

  BufferHandle() = default;
  BufferHandle(const BufferHandle &) = delete;
  BufferHandle &operator=(const BufferHandle &) = delete;
  ~BufferHandle() { lapilli_buffer_destroy(handle); }
};

struct RunHandle {
  lapilli_run *handle = nullptr;
  std::shared_ptr<ProgramHandle> program;
  uint32_t outputs = 0;

  RunHandle() = default;
  RunHandle(const RunHandle &) = delete;
  RunHandle &operator=(const RunHandle &) = delete;
  ~RunHandle() { lapilli_release(handle); }
};

inline std::string text_of(Span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

inline std::string take_json(char *json) {
  std::string text = json != nullptr ? json : "";
  lapilli_free(json);
  return text;
}

} // namespace detail

// -- devices

enum class DeviceType { other, integrated, discrete, virtual_gpu, cpu };

// What a device is. Programs and streams open it by its index or name.
class Device {
public:
  Device() = default;
  explicit Device(const lapilli_device_info &info) : info_(info) {}

  uint32_t index() const { return info_.index; }
  std::string name() const { return info_.name; }
  std::string driver() const { return info_.driver; }
  std::string api_version() const { return info_.api_version; }
  DeviceType type() const { return static_cast<DeviceType>(info_.type); }
  uint32_t vendor_id() const { return info_.vendor_id; }
  uint32_t device_id() const { return info_.device_id; }
  uint64_t memory() const { return info_.memory; }                 // bytes
  uint64_t allocation() const { return info_.allocation; }         // bytes of the largest buffer
  uint64_t host_alignment() const { return info_.host_alignment; } // of memory that import_memory() takes; 0: none
  const uint8_t *uuid() const { return info_.uuid; }               // 16 bytes, the same as in CUDA
  uint64_t alignment() const { return info_.alignment; }           // of tensors in a buffer

private:
  lapilli_device_info info_{};
};

// The devices, best first: discrete, integrated, virtual, other, CPU.
inline Result<std::vector<Device>> try_devices() {
  return detail::guarded([]() -> Result<std::vector<Device>> {
    uint32_t count = 0;
    if (const lapilli_status status = lapilli_device_count(&count); status != LAPILLI_OK)
      return detail::failed(status);
    std::vector<Device> devices;
    for (uint32_t i = 0; i < count; ++i) {
      lapilli_device_info info{};
      if (const lapilli_status status = lapilli_device(i, &info); status != LAPILLI_OK)
        return detail::failed(status);
      devices.emplace_back(info);
    }
    return devices;
  });
}

// Whether there is a Vulkan driver with a device. Never fails.
inline bool is_vulkan_available() {
  uint32_t count = 0;
  return lapilli_device_count(&count) == LAPILLI_OK && count > 0;
}

inline const char *version() { return lapilli_version(); }

// How to load a program or open a stream; see lapilli_load_options.
struct Options {
  std::string device;      // index, part of a name, or UUID; empty: $LAPILLI_DEVICE, or the best one
  std::string plan;        // empty: the first that the device satisfies
  std::string cache_dir;   // empty: the user's cache folder
  bool disk_cache = true;  // false: no cache on disk
  bool validation = false; // the Vulkan validation layers
  bool skip_checksum = false;
  bool first_run = false;    // check once for each file and driver that the device computes right: Program::warning
  uint64_t staging_size = 0; // bytes of the upload buffer; 0: 16 to 64 MiB, by the constants
  const lapilli_limits *limits = nullptr;
  const lapilli_vulkan *vulkan = nullptr; // a device that the application has, instead of `device`

  lapilli_load_options as_c() const {
    lapilli_load_options c{};
    c.device = device.empty() ? nullptr : device.c_str();
    c.plan = plan.empty() ? nullptr : plan.c_str();
    c.cache_dir = !disk_cache ? "" : cache_dir.empty() ? nullptr : cache_dir.c_str();
    c.validation = validation ? 1 : 0;
    c.skip_checksum = skip_checksum ? 1 : 0;
    c.first_run = first_run ? 1 : 0;
    c.staging_size = staging_size;
    c.limits = limits;
    c.vulkan = vulkan;
    return c;
  }
};

// -- streams

// Ordered work on one device, and the memory of the tensors there.
class Stream {
public:
  Stream() = default; // empty

  static Result<Stream> try_open(const Options &options = {}) {
    return detail::guarded([&]() -> Result<Stream> {
      auto made = std::make_shared<detail::StreamHandle>();
      const lapilli_load_options c = options.as_c();
      if (const lapilli_status status = lapilli_stream_create(&c, &made->handle); status != LAPILLI_OK)
        return detail::failed(status);
      return Stream(std::move(made));
    });
  }
  explicit operator bool() const { return stream_ != nullptr; }

  // Submits what is queued, without waiting.
  Result<void> try_flush() const {
    return call([](lapilli_stream *stream) { return lapilli_flush(stream); });
  }
  // Waits until all is done. Fails with out_of_range where int64 results of an earlier call did not fit into 32 bits.
  Result<void> try_synchronize() const {
    return detail::guarded([&]() -> Result<void> {
      if (auto waited = call([](lapilli_stream *stream) { return lapilli_synchronize(stream); }); !waited)
        return waited;
      return stream_->look();
    });
  }
  Result<void> try_empty_cache() const {
    return call([](lapilli_stream *stream) { return lapilli_empty_cache(stream); });
  }
  Result<void> try_set_memory_limit(uint64_t bytes) const {
    return call([&](lapilli_stream *stream) { return lapilli_set_memory_limit(stream, bytes); });
  }
  Result<lapilli_stream_memory_info> try_memory() const {
    lapilli_stream_memory_info info{};
    if (auto done = call([&](lapilli_stream *stream) { return lapilli_stream_memory(stream, &info); }); !done)
      return done.error();
    return info;
  }
  Result<Device> try_device() const {
    lapilli_device_info info{};
    if (auto done = call([&](lapilli_stream *stream) { return lapilli_stream_device(stream, &info); }); !done)
      return done.error();
    return Device(info);
  }
  lapilli_stream *handle() const { return stream_ ? stream_->handle : nullptr; } // stays this object's

#if LAPILLI_EXCEPTIONS
  static Stream open(const Options &options = {}) { return try_open(options).value(); }
  void flush() const { try_flush().value(); }
  void synchronize() const { try_synchronize().value(); }
  void empty_cache() const { try_empty_cache().value(); }
  void set_memory_limit(uint64_t bytes) const { try_set_memory_limit(bytes).value(); }
  lapilli_stream_memory_info memory() const { return try_memory().value(); }
  Device device() const { return try_device().value(); }
#endif

private:
  friend class Tensor;
  friend class Program;
  explicit Stream(std::shared_ptr<detail::StreamHandle> stream) : stream_(std::move(stream)) {}

  template <class F> Result<void> call(F &&f) const {
    return detail::guarded([&]() -> Result<void> {
      if (!stream_)
        return detail::empty("Stream");
      if (const lapilli_status status = f(stream_->handle); status != LAPILLI_OK)
        return detail::failed(status);
      return {};
    });
  }

  std::shared_ptr<detail::StreamHandle> stream_;
};

namespace detail {

struct DefaultStreams {
  std::mutex mutex;
  std::map<std::string, Stream> streams; // by device
};
inline DefaultStreams &default_streams() {
  static auto &all = *new DefaultStreams; // drivers do not like to be torn down while the process ends
  return all;
}

} // namespace detail

// The stream that `vulkan()` uses: one for each device (by index or part of a name; empty: the default one), opened when it is first
// needed, and anew when the device was lost.
inline Result<Stream> try_default_stream(const std::string &device = {}) {
  return detail::guarded([&]() -> Result<Stream> {
    auto &all = detail::default_streams();
    const std::lock_guard<std::mutex> lock(all.mutex);
    Stream &known = all.streams[device];
    if (known && known.try_flush().status() != Status::device_lost)
      return known;
    known = Stream();
    Options options;
    options.device = device;
    auto opened = Stream::try_open(options);
    if (opened)
      known = *opened;
    return opened;
  });
}

// -- tensors

using Shape = std::vector<int64_t>;

// A dense row-major tensor, in memory of the host or of a stream's device.
class Tensor {
public:
  Tensor() = default; // empty

  static Result<Tensor> try_empty(Span<const int64_t> shape, DType dtype = DType::float32) {
    return detail::guarded([&]() -> Result<Tensor> {
      Tensor tensor;
      if (auto checked = tensor.set(shape, dtype); !checked)
        return checked.error();
      std::shared_ptr<uint64_t[]> memory(new uint64_t[static_cast<size_t>(tensor.bytes_ / sizeof(uint64_t)) + 1]());
      tensor.data_ = memory.get();
      tensor.owner_ = std::shared_ptr<void>(memory, memory.get());
      return tensor;
    });
  }

  // A tensor over memory of the caller, which must stay as long as the tensor and its copies are used. `bytes`: of that memory.
  static Result<Tensor> try_from_blob(void *data, size_t bytes, Span<const int64_t> shape, DType dtype) {
    return detail::guarded([&]() -> Result<Tensor> {
      Tensor tensor;
      if (auto checked = tensor.set(shape, dtype); !checked)
        return checked.error();
      if (bytes < tensor.bytes_ || (data == nullptr && tensor.bytes_ > 0))
        return detail::invalid("A tensor " + tensor.text() + " takes " + std::to_string(tensor.bytes_) + " bytes; " +
                               (data == nullptr ? "the pointer is null." : std::to_string(bytes) + " were given."));
      tensor.data_ = data;
      static const auto borrowed = std::make_shared<char>();
      tensor.owner_ = std::shared_ptr<void>(borrowed, data);
      tensor.valid_ = true;
      return tensor;
    });
  }
  // The same where nothing is written: programs read it, and span() of elements that are not const fails.
  static Result<Tensor> try_from_blob(const void *data, size_t bytes, Span<const int64_t> shape, DType dtype) {
    auto made = try_from_blob(const_cast<void *>(data), bytes, shape, dtype);
    if (made)
      made->constant_ = true;
    return made;
  }
  template <class T> static Result<Tensor> try_from_blob(Span<T> values, Span<const int64_t> shape) {
    return try_from_blob(values.data(), values.size() * sizeof(T), shape, dtype_of<T>());
  }

  // A copy of values.
  template <class T> static Result<Tensor> try_of(Span<const T> values, Span<const int64_t> shape) {
    auto made = try_empty(shape, dtype_of<T>());
    if (!made)
      return made;
    if (made->numel() != static_cast<int64_t>(values.size()))
      return detail::guarded([&]() -> Result<Tensor> {
        return detail::invalid("A tensor " + made->text() + " has " + std::to_string(made->numel()) + " elements; " +
                               std::to_string(values.size()) + " were given.");
      });
    if (!values.empty())
      std::memcpy(made->data_, values.data(), values.size() * sizeof(T));
    return made;
  }

  explicit operator bool() const { return valid_; }
  bool is_vulkan() const { return buffer_ != nullptr; }
  Span<const int64_t> shape() const { return {shape_.data(), valid_ ? rank_ : 0}; }
  uint32_t dim() const { return valid_ ? rank_ : 0; }
  int64_t size(size_t axis) const { return axis < dim() ? shape_[axis] : 0; }
  DType dtype() const { return dtype_; }
  uint64_t nbytes() const { return valid_ ? bytes_ : 0; }
  int64_t numel() const { return valid_ && size_of(dtype_) != 0 ? static_cast<int64_t>(bytes_ / size_of(dtype_)) : 0; }

  // The elements of a tensor of the host. They are the tensor's memory: valid as long as it or a copy of it.
  template <class T> Result<Span<T>> try_span() const {
    return detail::guarded([&]() -> Result<Span<T>> {
      if (!valid_)
        return detail::empty("Tensor");
      if (dtype_of<T>() != dtype_)
        return detail::invalid("The tensor has elements of " + std::string(name_of(dtype_)) + ", and " + name_of(dtype_of<T>()) +
                               " were asked for.");
      if (is_vulkan())
        return detail::invalid("The tensor is on a Vulkan device. Call cpu(), which copies it to the host.");
      if (constant_ && !std::is_const<T>::value)
        return detail::invalid("The tensor is over memory that is constant. Ask for const elements.");
      return Span<T>(static_cast<T *>(data_), static_cast<size_t>(numel()));
    });
  }
  // A copy of the elements, from wherever they are.
  template <class T> Result<std::vector<T>> try_values() const {
    static_assert(!std::is_same<T, bool>::value, "std::vector<bool> holds no tensor; use span<const bool>().");
    return detail::guarded([&]() -> Result<std::vector<T>> {
      const auto host = try_cpu();
      if (!host)
        return host.error();
      const auto values = host->template try_span<const T>();
      if (!values)
        return values.error();
      return std::vector<T>(values->begin(), values->end());
    });
  }
  // The element of a tensor that has one.
  template <class T> Result<T> try_item() const {
    return detail::guarded([&]() -> Result<T> {
      if (valid_ && numel() != 1)
        return detail::invalid("The tensor " + text() + " has " + std::to_string(numel()) + " elements, and not one.");
      const auto host = try_cpu();
      if (!host)
        return host.error();
      const auto values = host->template try_span<const T>();
      if (!values)
        return values.error();
      return (*values)[0];
    });
  }

  // The tensor on a device: a copy, unless it is there already.
  Result<Tensor> try_vulkan() const {
    if (is_vulkan())
      return *this;
    const auto stream = try_default_stream();
    return stream ? try_vulkan(*stream) : Result<Tensor>(stream.error());
  }
  Result<Tensor> try_vulkan(const Stream &stream) const {
    return detail::guarded([&]() -> Result<Tensor> {
      if (!valid_)
        return detail::empty("Tensor");
      if (is_vulkan() && buffer_->stream == stream.stream_)
        return *this;
      auto made = try_empty_vulkan(stream, shape(), dtype_);
      if (!made)
        return made;
      if (auto copied = made->try_copy_from(*this); !copied)
        return copied.error();
      return made;
    });
  }
  // One with any contents.
  static Result<Tensor> try_empty_vulkan(const Stream &stream, Span<const int64_t> shape, DType dtype = DType::float32) {
    return on_device(stream, shape, dtype, [&](const Tensor &tensor, lapilli_buffer **to) {
      return lapilli_buffer_create(stream.handle(), tensor.bytes_, to);
    });
  }
  // Over memory of the caller (an address of the host, a file descriptor, an AHardwareBuffer, a VkBuffer; see lapilli_buffer_import),
  // which must stay as long as the tensor and its copies are used. Nothing is copied.
  static Result<Tensor> try_import_memory(const Stream &stream, const lapilli_shared_memory &memory, uint64_t bytes,
                                          Span<const int64_t> shape, DType dtype = DType::float32) {
    auto made = on_device(stream, shape, dtype, [&](const Tensor &, lapilli_buffer **to) {
      return lapilli_buffer_import(stream.handle(), &memory, bytes, to);
    });
    if (made && bytes < made->bytes_)
      return detail::guarded([&]() -> Result<Tensor> {
        return detail::invalid("A tensor " + made->text() + " takes " + std::to_string(made->bytes_) +
                               " bytes, and the memory has " + std::to_string(bytes) + ".");
      });
    return made;
  }
  // In memory that others can be told of, by LAPILLI_MEMORY_OPAQUE_FD or LAPILLI_MEMORY_DMA_BUF.
  static Result<Tensor> try_empty_shared(const Stream &stream, lapilli_memory_kind kind, Span<const int64_t> shape,
                                         DType dtype = DType::float32) {
    return on_device(stream, shape, dtype, [&](const Tensor &tensor, lapilli_buffer **to) {
      return lapilli_buffer_create_shared(stream.handle(), kind, tensor.bytes_, to);
    });
  }
  // Names the memory of a tensor on a device to others; see lapilli_buffer_export. The caller closes a file descriptor.
  Result<lapilli_shared_memory> try_export_memory(lapilli_memory_kind kind) const {
    return detail::guarded([&]() -> Result<lapilli_shared_memory> {
      if (!valid_)
        return detail::empty("Tensor");
      if (!is_vulkan())
        return detail::invalid("The tensor is on the host. Call vulkan(), or empty_shared() for one that others can read.");
      lapilli_shared_memory memory{};
      if (const auto status = lapilli_buffer_export(buffer_->handle, kind, &memory); status != LAPILLI_OK)
        return detail::failed(status);
      memory.offset += offset_;
      return memory;
    });
  }
  // The tensor on the host: a copy, unless it is there already. Waits for what was queued before.
  Result<Tensor> try_cpu() const {
    return detail::guarded([&]() -> Result<Tensor> {
      if (!valid_)
        return detail::empty("Tensor");
      if (!is_vulkan())
        return *this;
      auto made = try_empty(shape(), dtype_);
      if (!made)
        return made;
      if (auto copied = made->try_copy_from(*this); !copied)
        return copied.error();
      return made;
    });
  }
  // The stream of a tensor on a device; empty for one on the host.
  Stream stream() const { return is_vulkan() ? Stream(buffer_->stream) : Stream(); }

  // Copies the elements of a tensor of the same shape and dtype, wherever both are.
  Result<void> try_copy_from(const Tensor &from) const {
    return detail::guarded([&]() -> Result<void> {
      if (!valid_ || !from.valid_)
        return detail::empty("Tensor");
      if (dtype_ != from.dtype_ || !std::equal(shape().begin(), shape().end(), from.shape().begin(), from.shape().end()))
        return detail::invalid("A tensor " + from.text() + " cannot be copied to one " + text() +
                               ": shape and dtype must be the same.");
      if (constant_)
        return detail::invalid("The tensor is over memory that is constant, and cannot be written.");
      if (bytes_ == 0)
        return {};
      return is_vulkan() ? write(from) : read(from);
    });
  }

  // The same elements with another shape.
  Result<Tensor> try_reshape(Span<const int64_t> shape) const {
    return detail::guarded([&]() -> Result<Tensor> {
      if (!valid_)
        return detail::empty("Tensor");
      Tensor result = *this;
      if (auto checked = result.set(shape, dtype_); !checked)
        return checked.error();
      if (result.bytes_ != bytes_)
        return detail::invalid("A tensor " + text() + " cannot have the shape " + detail::text_of(shape) +
                               ": it has another number of elements.");
      return result;
    });
  }

  // Where a tensor of a device is, for the C ABI; it stays this object's. Null on the host.
  lapilli_buffer *buffer() const { return buffer_ ? buffer_->handle : nullptr; }
  uint64_t offset() const { return offset_; }
  // "float32 (1, 3)".
  std::string text() const { return std::string(name_of(dtype_)) + " " + detail::text_of(shape()); }

#if LAPILLI_EXCEPTIONS
  static Tensor empty(Span<const int64_t> shape, DType dtype = DType::float32) { return try_empty(shape, dtype).value(); }
  static Tensor from_blob(void *data, size_t bytes, Span<const int64_t> shape, DType dtype) {
    return try_from_blob(data, bytes, shape, dtype).value();
  }
  template <class T> static Tensor from_blob(Span<T> values, Span<const int64_t> shape) {
    return try_from_blob(values, shape).value();
  }
  template <class T> static Tensor of(Span<const T> values, Span<const int64_t> shape) { return try_of(values, shape).value(); }
  static Tensor empty_vulkan(const Stream &stream, Span<const int64_t> shape, DType dtype = DType::float32) {
    return try_empty_vulkan(stream, shape, dtype).value();
  }
  template <class T> Span<T> span() const { return try_span<T>().value(); }
  template <class T> std::vector<T> values() const { return try_values<T>().value(); }
  template <class T> T item() const { return try_item<T>().value(); }
  static Tensor import_memory(const Stream &stream, const lapilli_shared_memory &memory, uint64_t bytes, Span<const int64_t> shape,
                              DType dtype = DType::float32) {
    return try_import_memory(stream, memory, bytes, shape, dtype).value();
  }
  static Tensor empty_shared(const Stream &stream, lapilli_memory_kind kind, Span<const int64_t> shape,
                             DType dtype = DType::float32) {
    return try_empty_shared(stream, kind, shape, dtype).value();
  }
  lapilli_shared_memory export_memory(lapilli_memory_kind kind) const { return try_export_memory(kind).value(); }
  Tensor vulkan() const { return try_vulkan().value(); }
  Tensor vulkan(const Stream &stream) const { return try_vulkan(stream).value(); }
  Tensor cpu() const { return try_cpu().value(); }
  void copy_from(const Tensor &from) const { try_copy_from(from).value(); }
  Tensor reshape(Span<const int64_t> shape) const { return try_reshape(shape).value(); }
  Tensor reshape(std::initializer_list<int64_t> shape) const { return reshape(Span<const int64_t>(shape.begin(), shape.size())); }
#endif

private:
  friend class Program;
  friend class Run;

  Result<void> set(Span<const int64_t> shape, DType dtype) {
    if (size_of(dtype) == 0)
      return detail::invalid("There is no dtype " + std::to_string(static_cast<uint32_t>(dtype)) + ".");
    if (shape.size() > LAPILLI_MAX_RANK)
      return detail::invalid("A tensor has at most " + std::to_string(LAPILLI_MAX_RANK) + " dimensions; " +
                             std::to_string(shape.size()) + " were given.");
    constexpr uint64_t most = uint64_t{1} << 60;
    uint64_t bytes = size_of(dtype);
    bool empty = false, large = false;
    for (const int64_t size : shape) {
      if (size < 0)
        return detail::invalid("A tensor cannot have the shape " + detail::text_of(shape) + ": a size is negative.");
      empty = empty || size == 0;
      large = large || (size > 0 && bytes > most / static_cast<uint64_t>(size));
      bytes = large ? bytes : bytes * static_cast<uint64_t>(std::max<int64_t>(size, 1));
    }
    if (large && !empty)
      return detail::invalid("A tensor of shape " + detail::text_of(shape) + " is larger than any memory.");
    std::copy(shape.begin(), shape.end(), shape_.begin());
    rank_ = static_cast<uint32_t>(shape.size());
    dtype_ = dtype;
    bytes_ = empty ? 0 : bytes;
    valid_ = true;
    return {};
  }

  // A tensor whose buffer `make` makes.
  template <class F> static Result<Tensor> on_device(const Stream &stream, Span<const int64_t> shape, DType dtype, F &&make) {
    return detail::guarded([&]() -> Result<Tensor> {
      if (!stream)
        return detail::empty("Stream");
      Tensor tensor;
      if (auto checked = tensor.set(shape, dtype); !checked)
        return checked.error();
      auto buffer = std::make_shared<detail::BufferHandle>();
      buffer->stream = stream.stream_;
      if (const lapilli_status status = make(tensor, &buffer->handle); status != LAPILLI_OK)
        return detail::failed(status);
      tensor.buffer_ = std::move(buffer);
      return tensor;
    });
  }

  Result<void> read(const Tensor &from) const { // this one is on the host
    if (!from.is_vulkan()) {
      std::memmove(data_, from.data_, static_cast<size_t>(bytes_));
      return {};
    }
    if (auto looked = from.buffer_->stream->look(); !looked)
      return looked;
    if (const auto status = lapilli_buffer_read(from.buffer_->handle, from.offset_, data_, bytes_); status != LAPILLI_OK)
      return detail::failed(status);
    return {};
  }

  Result<void> write(const Tensor &from) const { // this one is on a device
    if (from.is_vulkan()) {
      if (from.buffer_->stream != buffer_->stream) {
        const auto host = from.try_cpu();
        return host ? write(*host) : Result<void>(host.error());
      }
      note(from.buffer_->largest);
      if (from.buffer_ == buffer_ && from.offset_ == offset_)
        return {};
      if (const auto status = lapilli_buffer_copy(from.buffer_->handle, from.offset_, buffer_->handle, offset_, bytes_);
          status != LAPILLI_OK)
        return detail::failed(status);
      return {};
    }
    if (dtype_ == DType::int64) {
      int64_t largest = 0;
      const auto *values = static_cast<const unsigned char *>(from.data_);
      for (uint64_t i = 0; i < bytes_ / 8; ++i) {
        int64_t value = 0; // not necessarily aligned
        std::memcpy(&value, values + 8 * i, sizeof value);
        if (value < INT32_MIN || value > INT32_MAX)
          return detail::invalid("Element " + std::to_string(i) + " is " + std::to_string(value) +
                                 ", and int64 values must fit into the 32 bits in which kernels compute integers "
                                 "(-2147483648..2147483647).");
        largest = std::max(largest, value < 0 ? -value : value);
      }
      note(largest);
    }
    if (const auto status = lapilli_buffer_write(buffer_->handle, offset_, from.data_, bytes_); status != LAPILLI_OK)
      return detail::failed(status);
    return {};
  }
  void note(int64_t largest) const {
    int64_t known = buffer_->largest;
    while (known < largest && !buffer_->largest.compare_exchange_weak(known, largest)) {
    }
  }

  lapilli_tensor as_c() const {
    lapilli_tensor c{};
    c.data = data_;
    c.size = bytes_;
    std::copy(shape_.begin(), shape_.end(), c.shape);
    c.rank = rank_;
    c.dtype = static_cast<uint32_t>(dtype_);
    return c;
  }

  std::shared_ptr<void> owner_; // of data_
  void *data_ = nullptr;
  std::shared_ptr<detail::BufferHandle> buffer_;
  uint64_t offset_ = 0;
  std::array<int64_t, LAPILLI_MAX_RANK> shape_{};
  uint32_t rank_ = 0;
  DType dtype_ = DType::float32;
  uint64_t bytes_ = 0;
  bool valid_ = false, constant_ = false;

public:
  Tensor(const Tensor &) = default;
  Tensor &operator=(const Tensor &) = default;
  Tensor(Tensor &&other) noexcept : Tensor(static_cast<const Tensor &>(other)) { other.clear(); }
  Tensor &operator=(Tensor &&other) noexcept {
    if (this != &other) {
      *this = static_cast<const Tensor &>(other);
      other.clear();
    }
    return *this;
  }
  ~Tensor() = default;

private:
  void clear() noexcept {
    owner_.reset();
    buffer_.reset();
    data_ = nullptr;
    valid_ = false;
  }
};

// -- runs

// A run in flight or finished, on tensors of the host.
class Run {
public:
  Run() = default; // empty
  explicit operator bool() const { return run_ != nullptr; }

  // Waits at most so many nanoseconds; fails with timeout if it is not finished by then.
  Result<void> try_wait(uint64_t nanoseconds = UINT64_MAX) const {
    return detail::guarded([&]() -> Result<void> {
      if (!run_)
        return detail::empty("Run");
      if (const auto status = lapilli_wait(run_->handle, nanoseconds); status != LAPILLI_OK)
        return detail::failed(status);
      return {};
    });
  }
  // Waits, and gives an output without a copy: its memory is the run's, which lives as long as the tensor.
  Result<Tensor> try_output(uint32_t index = 0) const {
    return detail::guarded([&]() -> Result<Tensor> {
      if (auto waited = try_wait(); !waited)
        return waited.error();
      lapilli_tensor c{};
      if (const auto status = lapilli_output(run_->handle, index, &c); status != LAPILLI_OK)
        return detail::failed(status);
      Tensor tensor;
      if (auto checked = tensor.set({c.shape, c.rank}, static_cast<DType>(c.dtype)); !checked)
        return checked.error();
      tensor.data_ = c.data;
      tensor.owner_ = std::shared_ptr<void>(run_, c.data);
      tensor.constant_ = true;
      return tensor;
    });
  }
  Result<std::vector<Tensor>> try_outputs() const {
    return detail::guarded([&]() -> Result<std::vector<Tensor>> {
      if (!run_)
        return detail::empty("Run");
      std::vector<Tensor> all;
      for (uint32_t i = 0; i < run_->outputs; ++i) {
        auto one = try_output(i);
        if (!one)
          return one.error();
        all.push_back(*std::move(one));
      }
      if (all.empty())
        if (auto waited = try_wait(); !waited)
          return waited.error();
      return all;
    });
  }

#if LAPILLI_EXCEPTIONS
  void wait(uint64_t nanoseconds = UINT64_MAX) const { try_wait(nanoseconds).value(); }
  Tensor output(uint32_t index = 0) const { return try_output(index).value(); }
  std::vector<Tensor> outputs() const { return try_outputs().value(); }
#endif

private:
  friend class Program;
  std::shared_ptr<detail::RunHandle> run_;
};

// -- programs

// The type and shape of an input, output or state. A dynamic size is -1, with bounds where they are known (else -1).
struct Spec {
  std::string name;
  DType dtype = DType::float32;
  Shape shape, min, max;
};

// A method by its name or index.
class MethodName {
public:
  MethodName(uint32_t index) : index_(index) {}
  MethodName(int index) : index_(static_cast<uint32_t>(index)) {}
  MethodName(const char *name) : name_(name != nullptr ? name : ""), named_(true) {}
  MethodName(std::string name) : name_(std::move(name)), named_(true) {}

private:
  friend class Program;
  uint32_t index_ = 0;
  std::string name_;
  bool named_ = false;
};

// A compiled model, loaded on a device.
class Program {
public:
  Program() = default; // empty

  static Result<Program> try_load(const std::string &path, const Options &options = {}) {
    return make(options, [&](const lapilli_load_options *c, lapilli_program **to) { return lapilli_load(path.c_str(), c, to); });
  }
  // From memory, which is not needed afterwards.
  static Result<Program> try_load(Span<const std::byte> bytes, const Options &options = {}) {
    return make(options, [&](const lapilli_load_options *c, lapilli_program **to) {
      return lapilli_load_memory(bytes.data(), bytes.size(), c, to);
    });
  }
  explicit operator bool() const { return program_ != nullptr; }

  // The output of "forward", or of the first method where none has that name. With an input on a Vulkan device the work is queued on
  // its stream and the output stays there; without, it is run and waited for.
  Result<Tensor> try_forward(Span<const Tensor> inputs) const {
    return detail::guarded([&]() -> Result<Tensor> {
      const auto method = main_method();
      if (!method)
        return method.error();
      if (method->info.outputs != 1)
        return detail::invalid("Method \"" + std::string(method->info.name) + "\" has " + std::to_string(method->info.outputs) +
                               " outputs: call run(), which returns all of them.");
      auto all = run_method(*method, inputs, {});
      if (!all)
        return all.error();
      return std::move(all->front());
    });
  }
  Result<Tensor> try_forward(std::initializer_list<Tensor> inputs) const {
    return try_forward(Span<const Tensor>(inputs.begin(), inputs.size()));
  }

  // All outputs of a method. sizes: of the symbols that no input shows (try_symbols, `given`).
  Result<std::vector<Tensor>> try_run(const MethodName &name, Span<const Tensor> inputs, Span<const int64_t> sizes = {}) const {
    return detail::guarded([&]() -> Result<std::vector<Tensor>> {
      const auto method = find(name);
      if (!method)
        return method.error();
      return run_method(*method, inputs, sizes);
    });
  }
  Result<std::vector<Tensor>> try_run(const MethodName &name, std::initializer_list<Tensor> inputs) const {
    return try_run(name, Span<const Tensor>(inputs.begin(), inputs.size()));
  }

  // Writes the outputs into tensors that exist, so that nothing is allocated: all on the host, or all on one stream.
  Result<void> try_run_into(const MethodName &name, Span<const Tensor> inputs, Span<const Tensor> outputs) const {
    return detail::guarded([&]() -> Result<void> {
      const auto method = find(name);
      if (!method)
        return method.error();
      return run_into_method(*method, inputs, outputs);
    });
  }

  // Submits a run on tensors of the host without waiting. They are copied before the call returns.
  Result<Run> try_submit(const MethodName &name, Span<const Tensor> inputs, Span<const int64_t> sizes = {}) const {
    return detail::guarded([&]() -> Result<Run> {
      const auto method = find(name);
      if (!method)
        return method.error();
      return submit_method(*method, inputs, sizes);
    });
  }
  Result<Run> try_submit(const MethodName &name, std::initializer_list<Tensor> inputs) const {
    return try_submit(name, Span<const Tensor>(inputs.begin(), inputs.size()));
  }

  Result<std::vector<std::string>> try_methods() const {
    return detail::guarded([&]() -> Result<std::vector<std::string>> {
      if (!program_)
        return detail::empty("Program");
      std::vector<std::string> names;
      for (uint32_t i = 0; i < lapilli_method_count(program_->handle); ++i) {
        lapilli_method_info info{};
        if (const auto status = lapilli_method(program_->handle, i, &info); status != LAPILLI_OK)
          return detail::failed(status);
        names.emplace_back(info.name);
      }
      return names;
    });
  }
  Result<std::vector<Spec>> try_inputs(const MethodName &method = 0) const {
    return specs(method, &lapilli_method_info::inputs, lapilli_input_spec);
  }
  Result<std::vector<Spec>> try_outputs(const MethodName &method = 0) const {
    return specs(method, &lapilli_method_info::outputs, lapilli_output_spec);
  }
  // The dynamic sizes of a method. Their names are valid as long as the program.
  Result<std::vector<lapilli_symbol_info>> try_symbols(const MethodName &name = 0) const {
    return detail::guarded([&]() -> Result<std::vector<lapilli_symbol_info>> {
      const auto method = find(name);
      if (!method)
        return method.error();
      std::vector<lapilli_symbol_info> all(method->info.symbols);
      for (uint32_t i = 0; i < all.size(); ++i)
        if (const auto status = lapilli_symbol(program_->handle, method->index, i, &all[i]); status != LAPILLI_OK)
          return detail::failed(status);
      return all;
    });
  }

  // States: tensors that stay on the device from run to run.
  Result<std::vector<Spec>> try_states() const {
    return detail::guarded([&]() -> Result<std::vector<Spec>> {
      if (!program_)
        return detail::empty("Program");
      std::vector<Spec> all;
      for (uint32_t i = 0; i < lapilli_state_count(program_->handle); ++i) {
        lapilli_spec c{};
        if (const auto status = lapilli_state_spec(program_->handle, i, &c); status != LAPILLI_OK)
          return detail::failed(status);
        all.push_back(spec_of(c));
      }
      return all;
    });
  }
  Result<Tensor> try_state(const std::string &name) const {
    return detail::guarded([&]() -> Result<Tensor> {
      const auto found = state_index(name);
      if (!found)
        return found.error();
      auto made = Tensor::try_empty(found->second.shape, found->second.dtype);
      if (!made)
        return made;
      if (const auto status = lapilli_state_read(program_->handle, found->first, made->data_, made->nbytes()); status != LAPILLI_OK)
        return detail::failed(status);
      return made;
    });
  }
  Result<void> try_set_state(const std::string &name, const Tensor &value) const {
    return detail::guarded([&]() -> Result<void> {
      const auto found = state_index(name);
      if (!found)
        return found.error();
      const auto host = value.try_cpu();
      if (!host)
        return host.error();
      const Spec &spec = found->second;
      if (host->dtype() != spec.dtype ||
          !std::equal(spec.shape.begin(), spec.shape.end(), host->shape().begin(), host->shape().end()))
        return detail::invalid("State \"" + name + "\" is " + name_of(spec.dtype) + " " + detail::text_of(spec.shape) +
                               "; a tensor " + host->text() + " was given.");
      if (const auto status = lapilli_state_write(program_->handle, found->first, host->data_, host->nbytes());
          status != LAPILLI_OK)
        return detail::failed(status);
      return {};
    });
  }
  Result<void> try_reset() const {
    return call([](lapilli_program *program) { return lapilli_reset(program); });
  }

  Result<Device> try_device() const {
    lapilli_device_info info{};
    if (auto done = call([&](lapilli_program *program) { return lapilli_program_device(program, &info); }); !done)
      return done.error();
    return Device(info);
  }
  // A new stream on the program's device, for x.vulkan(stream).
  Result<Stream> try_stream() const {
    return detail::guarded([&]() -> Result<Stream> {
      auto made = std::make_shared<detail::StreamHandle>();
      if (auto done = call([&](lapilli_program *program) { return lapilli_program_stream(program, &made->handle); }); !done)
        return done.error();
      return Stream(std::move(made));
    });
  }
  Result<lapilli_memory_info> try_memory() const {
    lapilli_memory_info info{};
    if (auto done = call([&](lapilli_program *program) { return lapilli_program_memory(program, &info); }); !done)
      return done.error();
    return info;
  }
  Result<lapilli_load_times> try_load_times() const {
    lapilli_load_times times{};
    if (auto done = call([&](lapilli_program *program) { return lapilli_program_load_times(program, &times); }); !done)
      return done.error();
    return times;
  }
  // JSON, as lapilli_program_describe and lapilli_program_info.
  Result<std::string> try_describe() const {
    return json([](lapilli_program *program, char **text) { return lapilli_program_describe(program, text); });
  }
  // A text that was stored in the file under a name; empty: there is none.
  std::string metadata(const std::string &name) const {
    const char *found = program_ ? lapilli_metadata(program_->handle, name.c_str()) : nullptr;
    return found != nullptr ? found : "";
  }
  // What the first-run check found (Options::first_run), as a sentence; empty: nothing, or there was none.
  std::string warning() const { return lapilli_program_warning(program_ ? program_->handle : nullptr); }

  Result<std::string> try_info() const {
    return json([](lapilli_program *program, char **text) { return lapilli_program_info(program, text); });
  }
  lapilli_program *handle() const { return program_ ? program_->handle : nullptr; } // stays this object's

#if LAPILLI_EXCEPTIONS
  static Program load(const std::string &path, const Options &options = {}) { return try_load(path, options).value(); }
  static Program load(Span<const std::byte> bytes, const Options &options = {}) { return try_load(bytes, options).value(); }
  Tensor forward(Span<const Tensor> inputs) const { return try_forward(inputs).value(); }
  Tensor forward(std::initializer_list<Tensor> inputs) const { return try_forward(inputs).value(); }
  std::vector<Tensor> run(const MethodName &method, Span<const Tensor> inputs, Span<const int64_t> sizes = {}) const {
    return try_run(method, inputs, sizes).value();
  }
  std::vector<Tensor> run(const MethodName &method, std::initializer_list<Tensor> inputs) const {
    return try_run(method, inputs).value();
  }
  void run_into(const MethodName &method, Span<const Tensor> inputs, Span<const Tensor> outputs) const {
    try_run_into(method, inputs, outputs).value();
  }
  Run submit(const MethodName &method, Span<const Tensor> inputs, Span<const int64_t> sizes = {}) const {
    return try_submit(method, inputs, sizes).value();
  }
  Run submit(const MethodName &method, std::initializer_list<Tensor> inputs) const { return try_submit(method, inputs).value(); }
  std::vector<std::string> methods() const { return try_methods().value(); }
  std::vector<Spec> inputs(const MethodName &method = 0) const { return try_inputs(method).value(); }
  std::vector<Spec> outputs(const MethodName &method = 0) const { return try_outputs(method).value(); }
  std::vector<lapilli_symbol_info> symbols(const MethodName &method = 0) const { return try_symbols(method).value(); }
  std::vector<Spec> states() const { return try_states().value(); }
  Tensor state(const std::string &name) const { return try_state(name).value(); }
  void set_state(const std::string &name, const Tensor &value) const { try_set_state(name, value).value(); }
  void reset() const { try_reset().value(); }
  Device device() const { return try_device().value(); }
  Stream stream() const { return try_stream().value(); }
  lapilli_memory_info memory() const { return try_memory().value(); }
  lapilli_load_times load_times() const { return try_load_times().value(); }
  std::string describe() const { return try_describe().value(); }
  std::string info() const { return try_info().value(); }
#endif

private:
  struct Method {
    uint32_t index = 0;
    lapilli_method_info info{};
  };
  static constexpr size_t most_checks = 256; // that wait to be looked at

  template <class F> static Result<Program> make(const Options &options, F &&load) {
    return detail::guarded([&]() -> Result<Program> {
      Program program;
      auto made = std::make_shared<detail::ProgramHandle>();
      const lapilli_load_options c = options.as_c();
      if (const lapilli_status status = load(&c, &made->handle); status != LAPILLI_OK)
        return detail::failed(status);
      program.program_ = std::move(made);
      return program;
    });
  }
  template <class F> Result<void> call(F &&f) const {
    return detail::guarded([&]() -> Result<void> {
      if (!program_)
        return detail::empty("Program");
      if (const lapilli_status status = f(program_->handle); status != LAPILLI_OK)
        return detail::failed(status);
      return {};
    });
  }
  template <class F> Result<std::string> json(F &&f) const {
    return detail::guarded([&]() -> Result<std::string> {
      char *text = nullptr;
      if (auto done = call([&](lapilli_program *program) { return f(program, &text); }); !done)
        return done.error();
      return detail::take_json(text);
    });
  }

  Result<Method> at(uint32_t index) const {
    Method method;
    method.index = index;
    if (const auto status = lapilli_method(program_->handle, index, &method.info); status != LAPILLI_OK)
      return detail::failed(status);
    return method;
  }
  Result<Method> find(const MethodName &name) const {
    if (!program_)
      return detail::empty("Program");
    if (!name.named_)
      return at(name.index_);
    std::string names;
    const uint32_t count = lapilli_method_count(program_->handle);
    for (uint32_t i = 0; i < count; ++i) {
      auto method = at(i);
      if (!method || method->info.name == name.name_)
        return method;
      names += (i > 0 ? ", " : "") + std::string(method->info.name);
    }
    return detail::invalid("There is no method \"" + name.name_ + "\": the program has " + names + ".");
  }
  Result<Method> main_method() const {
    if (auto named = find("forward"); named || !program_)
      return named;
    return at(0);
  }

  static Spec spec_of(const lapilli_spec &c) {
    return {c.name, static_cast<DType>(c.dtype), Shape(c.shape, c.shape + c.rank), Shape(c.min, c.min + c.rank),
            Shape(c.max, c.max + c.rank)};
  }
  template <class F> Result<std::vector<Spec>> specs(const MethodName &name, uint32_t lapilli_method_info::*count, F &&get) const {
    return detail::guarded([&]() -> Result<std::vector<Spec>> {
      const auto method = find(name);
      if (!method)
        return method.error();
      std::vector<Spec> all;
      for (uint32_t i = 0; i < method->info.*count; ++i) {
        lapilli_spec c{};
        if (const auto status = get(program_->handle, method->index, i, &c); status != LAPILLI_OK)
          return detail::failed(status);
        all.push_back(spec_of(c));
      }
      return all;
    });
  }
  Result<std::pair<uint32_t, Spec>> state_index(const std::string &name) const {
    const auto all = try_states();
    if (!all)
      return all.error();
    std::string names;
    for (uint32_t i = 0; i < all->size(); ++i) {
      if ((*all)[i].name == name)
        return std::pair<uint32_t, Spec>(i, (*all)[i]);
      names += (i > 0 ? ", " : "") + (*all)[i].name;
    }
    return detail::invalid("There is no state \"" + name + "\": the program has " + (names.empty() ? "none" : names) + ".");
  }

  static Result<void> check_all(Span<const Tensor> tensors, const char *what) {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!tensors[i])
        return detail::invalid(std::string(what) + " " + std::to_string(i) +
                               " is an empty lapilli::Tensor: it was moved from, or made without an argument.");
    return {};
  }
  // The stream of the first tensor on a device; empty where all are on the host.
  static Stream stream_of(Span<const Tensor> tensors) {
    for (const Tensor &tensor : tensors)
      if (tensor.is_vulkan())
        return tensor.stream();
    return {};
  }

  Result<Run> submit_method(const Method &method, Span<const Tensor> inputs, Span<const int64_t> sizes) const {
    if (auto checked = check_all(inputs, "Input"); !checked)
      return checked.error();
    std::vector<lapilli_tensor> c;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].is_vulkan())
        return detail::invalid("Input " + std::to_string(i) +
                               " is on a Vulkan device, and submit() takes tensors of the host. Call run() or forward(), "
                               "which do not wait either where an input is on a device.");
      c.push_back(inputs[i].as_c());
    }
    Run run;
    auto made = std::make_shared<detail::RunHandle>();
    made->program = program_;
    made->outputs = method.info.outputs;
    if (const auto status = lapilli_submit_sized(program_->handle, method.index, sizes.data(), static_cast<uint32_t>(sizes.size()),
                                                 c.data(), static_cast<uint32_t>(c.size()), &made->handle);
        status != LAPILLI_OK)
      return detail::failed(status);
    run.run_ = std::move(made);
    return run;
  }

  Result<std::vector<Tensor>> run_method(const Method &method, Span<const Tensor> inputs, Span<const int64_t> sizes) const {
    if (auto checked = check_all(inputs, "Input"); !checked)
      return checked.error();
    std::vector<Tensor> outputs;
    if (const Stream stream = stream_of(inputs)) {
      outputs.resize(method.info.outputs);
      if (auto queued = enqueue(method, stream, inputs, sizes, outputs); !queued)
        return queued.error();
      return outputs;
    }
    const auto run = submit_method(method, inputs, sizes);
    if (!run)
      return run.error();
    const auto results = run->try_outputs();
    if (!results)
      return results.error();
    for (const Tensor &result : *results) { // of their own: those of the run keep all its memory
      auto copy = Tensor::try_empty(result.shape(), result.dtype());
      if (!copy)
        return copy.error();
      if (auto copied = copy->try_copy_from(result); !copied)
        return copied.error();
      outputs.push_back(*std::move(copy));
    }
    return outputs;
  }

  Result<void> run_into_method(const Method &method, Span<const Tensor> inputs, Span<const Tensor> outputs) const {
    if (auto checked = check_all(inputs, "Input"); !checked)
      return checked;
    if (auto checked = check_all(outputs, "Output"); !checked)
      return checked;
    if (outputs.size() != method.info.outputs)
      return detail::invalid("Method \"" + std::string(method.info.name) + "\" has " + std::to_string(method.info.outputs) +
                             " outputs, and " + std::to_string(outputs.size()) + " tensors for them were given.");
    for (size_t i = 0; i < outputs.size(); ++i)
      if (outputs[i].constant_)
        return detail::invalid("Output " + std::to_string(i) + " is over memory that is constant.");
    const Stream stream = outputs.empty() ? stream_of(inputs) : stream_of(outputs);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (outputs[i].is_vulkan() != static_cast<bool>(stream))
        return detail::invalid("Some outputs are on the host and others on a device. Put all in one place.");
    if (!stream && stream_of(inputs))
      return detail::invalid("An input is on a Vulkan device and the outputs are on the host. Give outputs on its stream, or "
                             "inputs of the host.");
    if (stream) {
      std::vector<Tensor> into(outputs.begin(), outputs.end());
      return enqueue(method, stream, inputs, {}, into);
    }
    std::vector<lapilli_tensor> given, wanted;
    for (const Tensor &input : inputs)
      given.push_back(input.as_c());
    for (const Tensor &output : outputs)
      wanted.push_back(output.as_c());
    // The shapes are known before the run, which would leave the output of another shape in the tensor.
    std::vector<lapilli_tensor> expected(wanted);
    std::vector<int64_t> symbols(method.info.symbols);
    lapilli_status status = lapilli_symbols(program_->handle, method.index, given.data(), static_cast<uint32_t>(given.size()),
                                            symbols.data(), static_cast<uint32_t>(symbols.size()));
    if (status == LAPILLI_OK)
      status = lapilli_output_shapes(program_->handle, method.index, symbols.data(), static_cast<uint32_t>(symbols.size()),
                                     expected.data(), static_cast<uint32_t>(expected.size()));
    if (status != LAPILLI_OK)
      return detail::failed(status);
    if (auto checked = check_outputs(outputs, expected); !checked)
      return checked;
    status = lapilli_run_sync(program_->handle, method.index, given.data(), static_cast<uint32_t>(given.size()), wanted.data(),
                              static_cast<uint32_t>(wanted.size()));
    if (status != LAPILLI_OK)
      return detail::failed(status);
    return {};
  }

  template <class T> static Result<void> check_outputs(Span<const Tensor> outputs, const std::vector<T> &expected) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Span<const int64_t> shape(expected[i].shape, expected[i].rank);
      if (static_cast<uint32_t>(outputs[i].dtype()) != expected[i].dtype ||
          !std::equal(shape.begin(), shape.end(), outputs[i].shape().begin(), outputs[i].shape().end()))
        return detail::invalid("Output " + std::to_string(i) + " is " + name_of(static_cast<DType>(expected[i].dtype)) + " " +
                               detail::text_of(shape) + " for these inputs; a tensor " + outputs[i].text() + " was given.");
    }
    return {};
  }

  // Queues a run. Outputs that are empty are made.
  Result<void> enqueue(const Method &method, const Stream &stream, Span<const Tensor> inputs, Span<const int64_t> sizes,
                       std::vector<Tensor> &outputs) const {
    std::vector<Tensor> there; // inputs of the host are copied to the stream
    std::vector<lapilli_device_tensor> given;
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto moved = inputs[i].is_vulkan() ? Result<Tensor>(inputs[i]) : inputs[i].try_vulkan(stream);
      if (!moved)
        return moved.error();
      const int64_t largest = moved->buffer_->largest, limit = method.info.integer_limit;
      if (moved->dtype() == DType::int64 && limit > 0 && largest > limit)
        return detail::invalid("Input " + std::to_string(i) + " has an element of magnitude " + std::to_string(largest) +
                               ", and int64 values and what is computed from them must fit into the 32 bits in which "
                               "kernels compute integers (-" +
                               std::to_string(limit) + ".." + std::to_string(limit) + ").");
      given.push_back(as_device_tensor(*moved));
      there.push_back(*std::move(moved));
    }
    const bool checked = method.info.checks > 0;
    std::vector<lapilli_device_tensor> wanted(outputs.size() + (checked ? 1 : 0));
    std::vector<std::shared_ptr<detail::BufferHandle>> buffers;
    if (outputs.size() > 0 && outputs.front()) {
      if (auto fits = check_device_outputs(method, inputs, outputs); !fits)
        return fits;
      for (size_t i = 0; i < outputs.size(); ++i)
        wanted[i] = as_device_tensor(outputs[i]);
    } else {
      for (size_t i = 0; i < outputs.size(); ++i) {
        buffers.push_back(std::make_shared<detail::BufferHandle>());
        buffers.back()->stream = stream.stream_;
      }
    }
    detail::StreamHandle &handle = *stream.stream_;
    size_t waiting = 0;
    if (checked) {
      const std::lock_guard<std::mutex> lock(handle.mutex);
      handle.checks.reserve(handle.checks.size() + 1);
      waiting = handle.checks.size();
    }
    if (waiting >= most_checks)
      if (auto looked = handle.look(); !looked)
        return looked;
    if (const auto status = lapilli_enqueue_tensors(
            handle.handle, program_->handle, method.index, sizes.data(), static_cast<uint32_t>(sizes.size()), given.data(),
            static_cast<uint32_t>(given.size()), wanted.data(), static_cast<uint32_t>(wanted.size()));
        status != LAPILLI_OK)
      return detail::failed(status);
    for (size_t i = 0; i < buffers.size(); ++i)
      buffers[i]->handle = wanted[i].buffer;
    if (checked) {
      const std::lock_guard<std::mutex> lock(handle.mutex);
      handle.checks.push_back({wanted.back().buffer, program_, method.index});
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (auto set = outputs[i].set({wanted[i].shape, wanted[i].rank}, static_cast<DType>(wanted[i].dtype)); !set)
        return set;
      outputs[i].buffer_ = std::move(buffers[i]);
    }
    return {};
  }

  Result<void> check_device_outputs(const Method &method, Span<const Tensor> inputs, Span<const Tensor> outputs) const {
    std::vector<lapilli_tensor> given, expected(outputs.size());
    for (const Tensor &input : inputs) {
      given.push_back(input.as_c());
      given.back().size = 0; // the data is looked at by the run
    }
    std::vector<int64_t> symbols(method.info.symbols);
    lapilli_status status = lapilli_symbols(program_->handle, method.index, given.data(), static_cast<uint32_t>(given.size()),
                                            symbols.data(), static_cast<uint32_t>(symbols.size()));
    if (status == LAPILLI_OK)
      status = lapilli_output_shapes(program_->handle, method.index, symbols.data(), static_cast<uint32_t>(symbols.size()),
                                     expected.data(), static_cast<uint32_t>(expected.size()));
    if (status != LAPILLI_OK)
      return detail::failed(status);
    return check_outputs(outputs, expected);
  }

  static lapilli_device_tensor as_device_tensor(const Tensor &tensor) {
    lapilli_device_tensor c{};
    c.buffer = tensor.buffer();
    c.offset = tensor.offset();
    std::copy(tensor.shape_.begin(), tensor.shape_.end(), c.shape);
    c.rank = tensor.rank_;
    c.dtype = static_cast<uint32_t>(tensor.dtype_);
    return c;
  }

  std::shared_ptr<detail::ProgramHandle> program_;
};

// -- language models

// Writes tokens with a program that lapilli.LLM saved: one writer at a time, and no other runs of the program. Text is the caller's:
// Program::metadata("llm.tokenizer") is the tokenizer.
class Writer {
public:
  Writer() = default; // empty

  static Result<Writer> try_open(const Program &program) {
    return detail::guarded([&]() -> Result<Writer> {
      auto made = std::make_shared<Handle>();
      if (const lapilli_status status = lapilli_writer_create(program.handle(), &made->handle); status != LAPILLI_OK)
        return detail::failed(status);
      Writer writer;
      writer.writer_ = std::move(made);
      return writer;
    });
  }
  explicit operator bool() const { return writer_ != nullptr; }

  static lapilli_sampling likeliest() { return {0, 1, 0, 1, 0, 0}; }
  // What is written next follows these tokens; what they have in common with those before is not computed again.
  Result<void> try_begin(Span<const int32_t> tokens, const lapilli_sampling &sampling = likeliest()) const {
    return call([&](lapilli_writer *w) { return lapilli_writer_begin(w, tokens.data(), tokens.size(), &sampling); });
  }
  Result<int32_t> try_next() const {
    int32_t token = 0;
    if (auto done = call([&](lapilli_writer *w) { return lapilli_writer_next(w, &token, nullptr); }); !done)
      return done.error();
    return token;
  }
  Result<lapilli_writer_info> try_info() const {
    lapilli_writer_info info{};
    if (auto done = call([&](lapilli_writer *w) { return lapilli_writer_describe(w, &info); }); !done)
      return done.error();
    return info;
  }

#if LAPILLI_EXCEPTIONS
  explicit Writer(const Program &program) : Writer(try_open(program).value()) {}
  void begin(Span<const int32_t> tokens, const lapilli_sampling &sampling = likeliest()) const {
    try_begin(tokens, sampling).value();
  }
  int32_t next() const { return try_next().value(); }
  lapilli_writer_info info() const { return try_info().value(); }
#endif

private:
  struct Handle {
    lapilli_writer *handle = nullptr;
    Handle() = default;
    Handle(const Handle &) = delete;
    Handle &operator=(const Handle &) = delete;
    ~Handle() { lapilli_writer_destroy(handle); }
  };

  template <class F> Result<void> call(F &&f) const {
    return detail::guarded([&]() -> Result<void> {
      if (!writer_)
        return detail::empty("Writer");
      if (const lapilli_status status = f(writer_->handle); status != LAPILLI_OK)
        return detail::failed(status);
      return {};
    });
  }

  std::shared_ptr<Handle> writer_;
};

// -- functions with the names that PyTorch has

#if LAPILLI_EXCEPTIONS
inline std::vector<Device> devices() { return try_devices().value(); }
inline Stream default_stream(const std::string &device = {}) { return try_default_stream(device).value(); }

// A copy of values: tensor<float>({1, 2, 3}), of one dimension, or with a shape.
template <class T> Tensor tensor(std::initializer_list<T> values) {
  const int64_t count = static_cast<int64_t>(values.size());
  return Tensor::of<T>({values.begin(), values.size()}, {&count, 1});
}
template <class T> Tensor tensor(Span<const T> values, std::initializer_list<int64_t> shape) {
  return Tensor::of<T>(values, {shape.begin(), shape.size()});
}
inline Tensor zeros(std::initializer_list<int64_t> shape, DType dtype = DType::float32) {
  return Tensor::empty({shape.begin(), shape.size()}, dtype);
}
template <class T> Tensor full(std::initializer_list<int64_t> shape, T value) {
  const Tensor made = zeros(shape, dtype_of<T>());
  for (T &element : made.span<T>())
    element = value;
  return made;
}
// float32 in 0 to 1; the same values in every process unless another generator is given.
inline Tensor rand(Span<const int64_t> shape, std::mt19937 &generator) {
  const Tensor made = Tensor::empty(shape);
  for (float &element : made.span<float>())
    element = static_cast<float>(generator() >> 8) * (1.0f / 16777216.0f);
  return made;
}
inline Tensor rand(std::initializer_list<int64_t> shape) {
  thread_local std::mt19937 generator;
  return rand({shape.begin(), shape.size()}, generator);
}
// Over memory of the caller, which must stay as long as the tensor and its copies are used.
template <class T> Tensor from_blob(T *data, std::initializer_list<int64_t> shape) {
  uint64_t count = 1;
  for (const int64_t size : shape)
    count = size > 0 && count < UINT32_MAX * uint64_t{16} ? count * static_cast<uint64_t>(size) : size == 0 ? 0 : count;
  return Tensor::try_from_blob(data, static_cast<size_t>(count * sizeof(T)), Span<const int64_t>(shape.begin(), shape.size()),
                               dtype_of<T>())
      .value();
}
#endif

} // namespace v1
} // namespace lapilli

#endif
