// Every call to Vulkan and every allocation fails, one at a time, in four scenarios: the status says so, no number is ever
// wrong, nothing is left over or destroyed too early, and afterwards everything works.
//
//     test_faults [every [scenario]]    only every so many-th call fails; all of them by default
#include "base/platform.h"
#include "fault_loader.h"
#include "samples.h"
#include "scenarios.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>

// -- allocations of the player, which is part of this executable; those of drivers are left alone

extern "C" char __executable_start, etext;

static std::atomic<long> allocations{0}, failing_allocation{0};

static void* allocate(size_t size, void* from) {
  if (inside_the_player && failing_allocation > 0 && from >= &__executable_start && from < &etext &&
      ++allocations == failing_allocation)
    throw std::bad_alloc();
  if (void* memory = std::malloc(size > 0 ? size : 1))
    return memory;
  throw std::bad_alloc();
}

void* operator new(size_t size) { return allocate(size, __builtin_return_address(0)); }
void* operator new[](size_t size) { return allocate(size, __builtin_return_address(0)); }
// std::stable_sort asks for memory like this; AddressSanitizer has operators of its own where there are none here.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return allocate(size, __builtin_return_address(0));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Floats = std::vector<float>;

const FaultControl* control = nullptr;
int failures = 0;

void report(const char* scenario, const char* what, long n, const char* fired, const std::string& wrong) {
  ++failures;
  std::fprintf(stderr, "%s, %s %ld (%s): %s\n", scenario, what, n, fired != nullptr ? fired : "-", wrong.c_str());
}

// What is wrong after a scenario in which something failed.
std::string aftermath(const Outcome& outcome, bool look_whether_it_works) {
  if (!outcome.wrong.empty())
    return outcome.wrong + (outcome.first_failure.empty() ? "" : " (the first failure: " + outcome.first_failure + ")");
  if (const char* violation = control->violation())
    return std::string("destroyed too early: ") + violation;
  if (const std::string left = control->left(); !left.empty())
    return "left over: " + left;
  Outcome after;
  if (look_whether_it_works)
    run_without_failure(after);
  return after.wrong.empty() ? std::string() : "does not work afterwards: " + after.wrong;
}

struct Sweep {
  const char* what;
  int kind;
  long in_a_row;
  unsigned allowed;
};

constexpr Sweep sweeps[] = {
    {"out of memory at call", fault_out_of_memory, 1, bit(LAPILLI_OUT_OF_MEMORY)},
    {"out of memory from call", fault_out_of_memory, 5, bit(LAPILLI_OUT_OF_MEMORY)},
    {"device lost at call", fault_device_lost, 1, bit(LAPILLI_DEVICE_LOST)},
};

// Returns how many faults there were.
long try_calls(const Scenario& scenario, const Sweep& sweep, long every, long first) {
  long count = 0;
  for (long n = first;; n += every) {
    Outcome outcome;
    allowed_statuses = sweep.allowed;
    // What cannot be written down is lost with its stream.
    if (sweep.kind == fault_out_of_memory)
      allowed_statuses |= bit(LAPILLI_DEVICE_LOST);
    control->arm(n, sweep.kind, sweep.in_a_row);
    scenario.run(outcome);
    const char* const fired = control->fired();
    control->arm(0, 0, 0);
    if (fired == nullptr)
      return count;
    ++count;
    const bool may_lose =
        sweep.kind == fault_device_lost || std::strcmp(fired, "vkEndCommandBuffer") == 0 || sweep.in_a_row > 1;
    std::string wrong = aftermath(outcome, count % 4 == 0);
    if (wrong.empty() && !may_lose && outcome.first_failure.find(": 7 ") != std::string::npos)
      wrong = "work is lost: " + outcome.first_failure;
    if (!wrong.empty())
      report(scenario.name, sweep.what, n, fired, wrong);
  }
}

long try_allocations(const Scenario& scenario, long every, long first) {
  long count = 0;
  for (long n = first;; n += every) {
    Outcome outcome;
    allowed_statuses = bit(LAPILLI_OUT_OF_MEMORY) | bit(LAPILLI_DEVICE_LOST);
    allocations = 0;
    failing_allocation = n;
    scenario.run(outcome);
    failing_allocation = 0;
    if (allocations < n)
      return count;
    ++count;
    if (const std::string wrong = aftermath(outcome, count % 4 == 0); !wrong.empty())
      report(scenario.name, "out of memory at allocation", n, nullptr, wrong);
  }
}

// What happens once in a process, the instance, is tried in one of its own for every call.
long try_beginnings(long every) {
  for (long n = 1;; n += every) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      Outcome first, second;
      allowed_statuses = bit(LAPILLI_OUT_OF_MEMORY) | bit(LAPILLI_NO_DRIVER);
      control->arm(n, fault_out_of_memory, 1);
      scenarios[1].run(first);
      const char* const fired = control->fired();
      control->arm(0, 0, 0);
      if (const std::string wrong = aftermath(first, true); fired != nullptr && !wrong.empty())
        report("the beginning", "out of memory at call", n, fired, wrong);
      std::_Exit(failures != 0 ? 1 : fired == nullptr || std::strcmp(fired, "vkCreateDevice") == 0 ? 2 : 0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) == 1) {
      ++failures;
      std::fprintf(stderr, "the beginning, out of memory at call %ld: status %d\n", n, status);
      if (failures >= 10) // it may be that no child gets through
        return n;
    } else if (WEXITSTATUS(status) == 2) {
      return n;
    }
  }
}

// While what the lost device had is still there, a program can be loaded and a stream be made: on the device anew.
void a_lost_device_is_replaced() {
  Outcome outcome;
  Floats x{1, 2, 3}, y(3);
  const auto check = [&](bool holds, const char* what) {
    if (!holds)
      report("lost", what, 0, nullptr, lapilli_last_error());
  };
  const FileBytes file = sum_program();
  lapilli_load_options options{};
  options.cache_dir = "";
  std::array<lapilli_program*, 2> programs{};
  std::array<lapilli_stream*, 2> streams{};
  std::array<lapilli_buffer*, 2> buffers{};
  const auto open = [&](size_t i) {
    check(lapilli_load_memory(file.data(), file.size(), &options, &programs[i]) == LAPILLI_OK, "load");
    check(lapilli_stream_create(&options, &streams[i]) == LAPILLI_OK, "stream");
    check(lapilli_buffer_create(streams[i], 12, &buffers[i]) == LAPILLI_OK, "buffer");
  };
  const auto run = [&](size_t program, size_t stream) {
    const int64_t n = 3;
    const lapilli_slice slice{buffers[stream], 0};
    const std::array<lapilli_slice, 2> in{slice, slice};
    return lapilli_enqueue(streams[stream], programs[program], 0, &n, 1, in.data(), 2, &slice, 1);
  };
  open(0);
  check(lapilli_buffer_write(buffers[0], 0, x.data(), 12) == LAPILLI_OK, "write");
  control->arm(1, fault_device_lost, 1);
  check(run(0, 0) == LAPILLI_OK, "enqueue");
  check(lapilli_synchronize(streams[0]) == LAPILLI_DEVICE_LOST, "synchronize");
  control->arm(0, 0, 0);
  check(lapilli_buffer_read(buffers[0], 0, y.data(), 12) == LAPILLI_DEVICE_LOST, "read of the old one");
  open(1);
  check(run(0, 1) == LAPILLI_DEVICE_LOST, "the old program on the new stream");
  check(run(1, 0) == LAPILLI_DEVICE_LOST, "the new program on the old stream");
  check(lapilli_buffer_write(buffers[1], 0, x.data(), 12) == LAPILLI_OK && run(1, 1) == LAPILLI_OK, "enqueue again");
  check(lapilli_buffer_read(buffers[1], 0, y.data(), 12) == LAPILLI_OK && y == Floats{2, 4, 6}, "read again");
  for (size_t i = 0; i < 2; ++i) {
    lapilli_destroy(programs[i]);
    lapilli_buffer_destroy(buffers[i]);
    lapilli_stream_destroy(streams[i]);
  }
  if (const std::string wrong = aftermath(outcome, true); !wrong.empty())
    report("lost", "aftermath", 0, nullptr, wrong);
}

// A run is queued, and from the n-th call of a read on everything fails for a while: the run is done none the less, and
// nothing that was refused is.
void what_is_queued_outlasts_failures() {
  Outcome outcome;
  const auto check = [&](long n, const char* fired, bool holds, const char* what) {
    if (!holds)
      report("queued", what, n, fired, lapilli_last_error());
  };
  const FileBytes file = sum_program();
  lapilli_load_options options{};
  options.cache_dir = "";
  lapilli_program* program = nullptr;
  check(0, nullptr, lapilli_load_memory(file.data(), file.size(), &options, &program) == LAPILLI_OK, "load");
  const char* fired = "";
  bool kept = false;
  for (long n = 1; fired != nullptr; ++n) {
    lapilli_stream* stream = nullptr;
    std::array<lapilli_buffer*, 2> buffers{};
    check(n, nullptr, lapilli_stream_create(&options, &stream) == LAPILLI_OK, "stream");
    for (lapilli_buffer*& buffer : buffers)
      check(n, nullptr, lapilli_buffer_create(stream, 12, &buffer) == LAPILLI_OK, "buffer");
    const Floats x{1, 2, 3}, old{7, 7, 7}, other{9, 9, 9};
    Floats y(3);
    const int64_t three = 3;
    const lapilli_slice from{buffers[0], 0}, to{buffers[1], 0};
    const std::array<lapilli_slice, 2> in{from, from}, again{to, to};
    const auto run = [&](const std::array<lapilli_slice, 2>& inputs) {
      return lapilli_enqueue(stream, program, 0, &three, 1, inputs.data(), 2, &to, 1);
    };
    const auto copy = [&] { return lapilli_buffer_copy(buffers[0], 0, buffers[1], 0, 12); };
    const auto read = [&] { return lapilli_buffer_read(buffers[1], 0, y.data(), 12); };
    check(n, nullptr, lapilli_buffer_write(buffers[0], 0, x.data(), 12) == LAPILLI_OK, "write");
    check(n, nullptr, lapilli_buffer_write(buffers[1], 0, old.data(), 12) == LAPILLI_OK, "write");
    check(n, nullptr, run(in) == LAPILLI_OK, "enqueue");
    control->arm(n, fault_out_of_memory, 1000);
    const lapilli_status status = read();
    fired = control->fired();
    Floats input = x, wanted{2, 4, 6};
    if (status == LAPILLI_OUT_OF_MEMORY) {
      if (lapilli_buffer_write(buffers[0], 0, other.data(), 12) == LAPILLI_OK)
        input = other;
      if (run(again) == LAPILLI_OK)
        for (float& value : wanted)
          value *= 2;
      if (copy() == LAPILLI_OK)
        wanted = input;
      kept = kept || std::strcmp(fired, "vkResetFences") == 0;
    }
    control->arm(0, 0, 0);
    const bool lost = status == LAPILLI_DEVICE_LOST;
    check(n, fired, !lost || std::strcmp(fired, "vkEndCommandBuffer") == 0, "the run is lost");
    if (lost)
      check(n, fired, read() == LAPILLI_DEVICE_LOST, "goes on after the run was lost");
    else
      check(n, fired, read() == LAPILLI_OK && y == wanted, "what was queued is not there");
    for (lapilli_buffer* buffer : buffers)
      lapilli_buffer_destroy(buffer);
    lapilli_stream_destroy(stream);
  }
  lapilli_destroy(program);
  check(0, nullptr, kept, "nothing was kept");
  if (const std::string wrong = aftermath(outcome, true); !wrong.empty())
    report("queued", "aftermath", 0, nullptr, wrong);
}

// What was cached is left out where the driver fails with it.
void refused_cache() {
  const std::string folder = "faults-cache";
  std::filesystem::remove_all(folder);
  const FileBytes file = sum_program();
  lapilli_load_options options{};
  options.cache_dir = folder.c_str();
  const auto load = [&] {
    lapilli_program* program = nullptr;
    const lapilli_status status = lapilli_load_memory(file.data(), file.size(), &options, &program);
    char* json = nullptr;
    std::string info;
    if (status == LAPILLI_OK && lapilli_program_info(program, &json) == LAPILLI_OK)
      info = json;
    lapilli_free(json);
    lapilli_destroy(program);
    return info;
  };
  load();
  const bool cached = load().find("\"found\":true") != std::string::npos;
  for (long n = 1; cached && n < 20; ++n) {
    control->arm(n, fault_out_of_memory, 1);
    const std::string info = load();
    const char* const fired = control->fired();
    control->arm(0, 0, 0);
    if (fired == nullptr || std::strcmp(fired, "vkCreatePipelineCache") != 0)
      continue;
    if (info.find("\"found\":false") == std::string::npos)
      report("cache", "refused", n, fired, lapilli_last_error());
    std::filesystem::remove_all(folder);
    return;
  }
  report("cache", "never refused", cached, nullptr, lapilli_last_error());
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

int main(int argc, char** argv) {
  const long every = argc > 1 ? std::max(1L, std::atol(argv[1])) : 1;
  if (void* loader = lapilli::open_library("libvulkan.so.1"))
    control = static_cast<const FaultControl*>(lapilli::find_symbol(loader, "fault_control"));
  if (control == nullptr) {
    std::fprintf(stderr, "The loader that makes calls fail comes first: set LD_LIBRARY_PATH to its folder.\n");
    return EXIT_FAILURE;
  }
  double last = seconds();
  const auto tell = [&](const char* scenario, const char* what, long count) {
    const double now = seconds();
    std::printf("%-8s %-28s %4ld faults, %5.1f s\n", scenario, what, count, now - last);
    std::fflush(stdout);
    last = now;
  };
  if (argc <= 2) {
    tell("begin", "out of memory at call", try_beginnings(1));
    a_lost_device_is_replaced();
    what_is_queued_outlasts_failures();
    refused_cache();
  }
  for (const Scenario& scenario : scenarios) {
    if (argc > 2 && std::strcmp(argv[2], scenario.name) != 0)
      continue;
    Outcome outcome;
    allowed_statuses = 0;
    scenario.run(outcome);
    if (const std::string wrong = aftermath(outcome, true); !wrong.empty())
      report(scenario.name, "no fault", 0, nullptr, wrong);
    long first = 0; // so that the scenarios together try what each of them leaves out
    for (const char c : std::string(scenario.name))
      first += c;
    for (const Sweep& sweep : sweeps)
      tell(scenario.name, sweep.what, try_calls(scenario, sweep, every, 1 + first % every));
    tell(scenario.name, "out of memory at allocation", try_allocations(scenario, 3 * every, 1 + first % every));
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
