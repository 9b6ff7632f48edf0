#include "scenarios.h"

#include "floats.h"
#include "samples.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <vector>

namespace {

class Calls {
public:
  explicit Calls(Outcome& outcome) : outcome_(outcome) {}

  // Whether the call succeeded.
  template <class F> bool operator()(const char* what, F&& call) {
    const lapilli_status status = inside(call);
    last_ = status;
    if (status == LAPILLI_OK)
      return true;
    const std::string message = lapilli_last_error();
    ++outcome_.failures;
    if (outcome_.first_failure.empty())
      outcome_.first_failure = std::string(what) + ": " + std::to_string(status) + " " + message;
    if ((allowed_statuses >> status & 1) == 0)
      wrong(std::string(what) + " returned " + std::to_string(status) + ": " + message);
    if (message.empty())
      wrong(std::string(what) + " failed without a message");
    return false;
  }

  // The same for what may fail once and is then tried again.
  template <class F> bool twice(const char* what, F&& call) { return (*this)(what, call) || (*this)(what, call); }

  template <class F> static auto inside(F&& call) {
    inside_the_player = true;
    struct End {
      ~End() { inside_the_player = false; }
    } end;
    return call();
  }

  lapilli_status last() const { return last_; }

  void wrong(const std::string& what) {
    if (outcome_.wrong.empty())
      outcome_.wrong = what;
  }

  void compare(const char* what, std::span<const float> got, std::span<const float> wanted) {
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != wanted[i])
        return wrong(std::string(what) + ": element " + std::to_string(i) + " is " + std::to_string(got[i]) +
                     ", and should be " + std::to_string(wanted[i]));
  }

private:
  Outcome& outcome_;
  lapilli_status last_ = LAPILLI_OK;
};

lapilli_load_options options() {
  lapilli_load_options result{};
  result.cache_dir = "";
  return result;
}

lapilli_program* load(Calls& ok, const FileBytes& file) {
  lapilli_program* program = nullptr;
  const lapilli_load_options given = options();
  ok.twice("load", [&] { return lapilli_load_memory(file.data(), file.size(), &given, &program); });
  return program;
}

void destroy(lapilli_program* program) {
  Calls::inside([&] { lapilli_destroy(program); });
}

// Runs of all kinds of one program, with two sizes.
void runs(Outcome& outcome, bool texel) {
  Calls ok(outcome);
  lapilli_program* const program = load(ok, sample_program({.texel = texel}));
  if (program == nullptr)
    return;
  char* json = nullptr;
  if (ok("info", [&] { return lapilli_program_info(program, &json); }))
    lapilli_free(json);
  for (const int64_t n : {3, 5}) {
    Floats x(static_cast<size_t>(n) * 7), y(x.size(), -1.0f), wanted(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(i);
      wanted[i] = sample_result(x[i], static_cast<uint32_t>(i % 7));
    }
    const lapilli_tensor in = tensor(x, {n, 7});
    lapilli_tensor out = tensor(y, {n, 7});
    if (ok("run_sync", [&] { return lapilli_run_sync(program, 0, &in, 1, &out, 1); }))
      ok.compare("run_sync", y, wanted);
    std::array<lapilli_run*, 3> submitted{};
    for (lapilli_run*& run : submitted)
      if (!ok("submit", [&] { return lapilli_submit(program, 0, &in, 1, &run); }))
        run = nullptr;
    for (lapilli_run* run : submitted) {
      lapilli_tensor result{};
      if (run != nullptr && ok("wait", [&] { return lapilli_wait(run, UINT64_MAX); }) &&
          ok("output", [&] { return lapilli_output(run, 0, &result); }))
        ok.compare("submit", {static_cast<const float*>(result.data), x.size()}, wanted);
      Calls::inside([&] { lapilli_release(run); });
    }
    std::array<uint64_t, 8> nanoseconds{};
    uint64_t total = 0;
    uint32_t count = 0;
    ok("profile", [&] { return lapilli_profile(program, 0, &in, 1, 2, nanoseconds.data(), 8, &count, &total); });
    Floats part(21, -1.0f); // of the first command: x + 3 w
    if (ok("read_buffer", [&] { return lapilli_read_buffer(program, 0, &in, 1, 0, 4, part.data(), 84); }))
      for (size_t i = 0; i < part.size(); ++i)
        wanted[i] = x[i] + 3.0f * static_cast<float>(i % 7);
    else
      continue;
    ok.compare("read_buffer", part, std::span(wanted).first(21));
  }
  destroy(program);
}

void sample(Outcome& outcome) { runs(outcome, true); }
void plain(Outcome& outcome) { runs(outcome, false); }

// A call that fails has not changed a state, or says that the states are lost until they are reset.
void states(Outcome& outcome) {
  Calls ok(outcome);
  lapilli_program* const program = load(ok, state_program());
  if (program == nullptr)
    return;
  const Floats initial{1, 2, 3, 4};
  Floats total = initial;
  const auto found = [&] {
    if (ok.last() == LAPILLI_DEVICE_LOST && ok("reset", [&] { return lapilli_reset(program); }))
      total = initial;
  };
  for (int round = 0; round < 4; ++round) {
    Floats x{1, 1, 1, static_cast<float>(round)}, y(4), now(4);
    const lapilli_tensor in = tensor(x, {4});
    lapilli_tensor out = tensor(y, {4});
    if (ok("run", [&] { return lapilli_run_sync(program, 0, &in, 1, &out, 1); })) {
      for (size_t i = 0; i < 4; ++i)
        total[i] += x[i];
      ok.compare("run", y, total);
    } else {
      found();
    }
    const Floats given{9, 9, 9, 9};
    if (round == 1 && ok("state_write", [&] { return lapilli_state_write(program, 0, given.data(), 16); }))
      total = given;
    if (round == 2 && ok("reset", [&] { return lapilli_reset(program); }))
      total = initial;
    std::array<uint64_t, 8> nanoseconds{};
    uint64_t time = 0;
    uint32_t count = 0;
    if (!ok("profile", [&] { return lapilli_profile(program, 0, &in, 1, 1, nanoseconds.data(), 8, &count, &time); }))
      found();
    if (ok("state_read", [&] { return lapilli_state_read(program, 0, now.data(), 16); }))
      ok.compare("state_read", now, total);
    else
      found();
  }
  destroy(program);
}

// On one stream: a call that fails has queued nothing, and what was queued before is there.
void stream(Outcome& outcome) {
  Calls ok(outcome);
  const lapilli_load_options given = options();
  lapilli_stream* stream = nullptr;
  if (!ok.twice("stream_create", [&] { return lapilli_stream_create(&given, &stream); }))
    return;
  lapilli_program* const sum = load(ok, sum_program());
  lapilli_program* const adding = load(ok, state_program());
  lapilli_program* const texel = load(ok, sample_program({.texel = true}));
  const int64_t n = 3000;
  const uint64_t bytes = 4 * static_cast<uint64_t>(n);
  std::array<lapilli_buffer*, 4> buffers{};
  for (lapilli_buffer*& buffer : buffers)
    ok.twice("buffer_create", [&] { return lapilli_buffer_create(stream, bytes, &buffer); });
  // What each buffer and the state hold, element by element: a run of a smaller shape changes a part of a buffer, and
  // that part stays when the write that should replace it fails.
  std::array<Floats, 4> holds;
  holds.fill(Floats(static_cast<size_t>(n)));
  Floats total{1, 2, 3, 4};
  bool usable = sum != nullptr && adding != nullptr && texel != nullptr &&
                std::ranges::none_of(buffers, [](const lapilli_buffer* buffer) { return buffer == nullptr; });
  // The stream says so, once, when what was queued is lost; from then on it refuses everything.
  const auto did = [&](const char* what, auto&& call) {
    const bool done = ok(what, call);
    if (usable && ok.last() == LAPILLI_DEVICE_LOST)
      usable = false;
    else if (!usable && ok.last() != LAPILLI_DEVICE_LOST)
      ok.wrong(std::string(what) + " goes on after work was lost");
    return done;
  };
  Floats values(static_cast<size_t>(n));
  const auto write = [&](size_t to, float value, int tries = 2) {
    std::ranges::fill(values, value);
    for (int i = 0; i < tries && usable; ++i)
      if (did("write", [&] { return lapilli_buffer_write(buffers[to], 0, values.data(), bytes); })) {
        holds[to] = values;
        return;
      }
  };
  const auto read = [&](size_t from) {
    if (usable && did("read", [&] { return lapilli_buffer_read(buffers[from], 0, values.data(), bytes); }))
      ok.compare("read", values, holds[from]);
  };
  for (size_t i = 0; i < 4; ++i)
    write(i, 1.0f, 6); // until it is done: no more than five calls fail
  for (int round = 0; round < 24 && usable; ++round) {
    const std::array<lapilli_slice, 2> in{{{buffers[0], 0}, {buffers[1], 0}}};
    const lapilli_slice out{buffers[2], 0};
    if (did("enqueue", [&] { return lapilli_enqueue(stream, sum, 0, &n, 1, in.data(), 2, &out, 1); }))
      std::ranges::transform(holds[0], holds[1], holds[2].begin(), std::plus());
    if (did("copy", [&] { return lapilli_buffer_copy(buffers[2], 0, buffers[0], 0, bytes); }))
      holds[0] = holds[2];
    if (round % 7 == 3) {
      const float two = 2;
      uint32_t pattern = 0;
      std::memcpy(&pattern, &two, 4);
      if (did("fill", [&] { return lapilli_buffer_fill(buffers[1], 0, bytes, pattern); }))
        std::ranges::fill(holds[1], two);
    }
    if (round % 5 == 2) { // three commands and temporary tensors; 3 w is 0, 3, .. 18 and N = 4
      const int64_t rows = 4;
      const lapilli_slice from{buffers[3], 0}, to{buffers[2], 0};
      if (did("enqueue three", [&] { return lapilli_enqueue(stream, texel, 0, &rows, 1, &from, 1, &to, 1); }))
        for (size_t i = 0; i < 28; ++i)
          holds[2][i] = sample_result(holds[3][i], static_cast<uint32_t>(i % 7));
      if (usable && did("read", [&] { return lapilli_buffer_read(buffers[2], 0, values.data(), 112); }))
        ok.compare("three commands", std::span(values).first(28), std::span(holds[2]).first(28));
      write(2, 5.0f);
    }
    if (round % 6 == 1) {
      const lapilli_slice from{buffers[3], 0}, to{buffers[2], 0};
      if (did("enqueue state", [&] { return lapilli_enqueue(stream, adding, 0, nullptr, 0, &from, 1, &to, 1); })) {
        std::ranges::transform(total, holds[3], total.begin(), std::plus());
        std::ranges::copy(total, holds[2].begin());
      }
      write(2, 3.0f);
    }
    if (round % 11 == 5)
      did("flush", [&] { return lapilli_flush(stream); });
    if (round % 13 == 7)
      did("empty_cache", [&] { return lapilli_empty_cache(stream); });
    if (round % 10 == 9) {
      read(0);
      write(0, static_cast<float>(round));
    }
    lapilli_buffer* passing = nullptr;
    if (did("passing buffer",
            [&] { return lapilli_buffer_create(stream, 100'000 * static_cast<uint64_t>(round + 1), &passing); }))
      Calls::inside([&] { lapilli_buffer_destroy(passing); });
  }
  for (size_t i = 0; i < 3; ++i)
    read(i);
  Floats state(4);
  if (usable && ok("state_read", [&] { return lapilli_state_read(adding, 0, state.data(), 16); }))
    ok.compare("state_read", state, total);
  if (usable)
    did("synchronize", [&] { return lapilli_synchronize(stream); });
  Calls::inside([&] {
    lapilli_destroy(sum);
    lapilli_destroy(adding);
    lapilli_destroy(texel);
    for (size_t i = 0; i < 2; ++i)
      lapilli_buffer_destroy(buffers[i]);
    lapilli_stream_destroy(stream);
    for (size_t i = 2; i < 4; ++i)
      lapilli_buffer_destroy(buffers[i]);
  });
}

} // namespace

const Scenario scenarios[4] = {{"sample", sample}, {"plain", plain}, {"states", states}, {"stream", stream}};

void run_without_failure(Outcome& outcome) {
  Calls ok(outcome);
  const unsigned allowed = std::exchange(allowed_statuses, 0u);
  lapilli_program* const program = load(ok, sum_program());
  if (program != nullptr) {
    Floats a{1, 2, 3}, y(3);
    const std::array<lapilli_tensor, 2> in{tensor(a, {3}), tensor(a, {3})};
    lapilli_tensor out = tensor(y, {3});
    if (ok("run", [&] { return lapilli_run_sync(program, 0, in.data(), 2, &out, 1); }))
      ok.compare("run", y, Floats{2, 4, 6});
    destroy(program);
  }
  allowed_statuses = allowed;
}
