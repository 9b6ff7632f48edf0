// What all functions of the C ABI do: exceptions become a status and a message of the calling thread.
#pragma once

#include "base/error.h"
#include "core/program.h"

struct lapilli_program {
  std::shared_ptr<lapilli::Program> program;
};

namespace lapilli {

// Remembers the message of the exception that is being handled.
lapilli_status status_of_exception() noexcept;

template <class F> lapilli_status guarded(F&& f) noexcept {
  try {
    f();
    return LAPILLI_OK;
  } catch (...) {
    return status_of_exception();
  }
}

// What a build may leave out: the functions stay, and say so.
inline constexpr bool has_profiler = LAPILLI_HAS_PROFILER != 0, has_json = LAPILLI_HAS_JSON != 0;
inline constexpr bool has_writer = LAPILLI_HAS_WRITER != 0, has_first_run = LAPILLI_HAS_FIRST_RUN != 0;
[[noreturn]] void fail_left_out(const char* part);

// As guarded, for functions of a part of the player that may have been left out.
template <bool present, class F> lapilli_status guarded_part(const char* part, F&& f) noexcept {
  if constexpr (present)
    return guarded(f);
  else
    return guarded([&] { fail_left_out(part); });
}
template <class F> lapilli_status guarded_json(F&& f) noexcept { return guarded_part<has_json>("JSON", f); }
template <class F> lapilli_status guarded_profiler(F&& f) noexcept { return guarded_part<has_profiler>("PROFILER", f); }
template <class F> lapilli_status guarded_stream(F&& f) noexcept { return guarded_part<has_streams>("STREAMS", f); }
template <class F> lapilli_status guarded_writer(F&& f) noexcept { return guarded_part<has_writer>("WRITER", f); }

// Throws where an argument is null.
void need(const void* pointer, const char* name);
Program& checked(lapilli_program* program);

template <class T> std::span<T> items(T* pointer, uint64_t count, const char* name) {
  if (count > 0)
    need(pointer, name);
  return {pointer, static_cast<size_t>(count)};
}

// A device for callers without JSON.
void fill_device(const hal::Capabilities& device, uint32_t index, lapilli_device_info& info);

// A copy of a text for the caller.
void give(const std::string& text, char** out);

} // namespace lapilli
