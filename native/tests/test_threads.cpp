// Several threads on the same and on different programs, one stream, loads and ends; also under ThreadSanitizer. Only what
// lapilli.h allows. Some seconds; the argument says how many.

#include "floats.h"
#include "loaded.h"

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

namespace {

std::atomic<int> wrong{0};
void need(bool holds, const char* what) {
  if (!holds && wrong++ < 10)
    std::fprintf(stderr, "%s: %s\n", what, lapilli_last_error());
}

void runs(lapilli_program* program, std::mt19937& random, bool submitted) {
  const auto n = static_cast<int64_t>(1 + random() % 6);
  Floats x = random_values(static_cast<size_t>(n) * 7, static_cast<unsigned>(random())), y(x.size());
  const lapilli_tensor in = tensor(x, {n, 7});
  lapilli_tensor out = tensor(y, {n, 7});
  const auto compare = [&](const float* values) {
    for (size_t i = 0; i < x.size(); ++i)
      if (values[i] != sample_result(x[i], static_cast<uint32_t>(i % 7)))
        return need(false, "a wrong number");
  };
  if (!submitted) {
    need(lapilli_run_sync(program, 0, &in, 1, &out, 1) == LAPILLI_OK, "run_sync");
    return compare(y.data());
  }
  std::array<lapilli_run*, 3> handles{};
  for (lapilli_run*& run : handles)
    need(lapilli_submit(program, 0, &in, 1, &run) == LAPILLI_OK, "submit");
  for (lapilli_run* run : handles) {
    lapilli_tensor result{};
    std::thread other([&] { need(lapilli_wait(run, UINT64_MAX) == LAPILLI_OK, "wait elsewhere"); });
    need(lapilli_wait(run, UINT64_MAX) == LAPILLI_OK, "wait");
    need(lapilli_output(run, 0, &result) == LAPILLI_OK, "output");
    other.join();
    if (result.data != nullptr)
      compare(static_cast<const float*>(result.data));
    lapilli_release(run);
  }
}

// What all threads share.
struct Shared {
  lapilli_program *sample, *states, *sum;
  lapilli_stream *stream, *other;
  std::atomic<int> added{0};
};

void on_stream(Shared& shared, std::mt19937& random, float value) {
  const auto n = static_cast<int64_t>(100 + random() % 5000);
  const uint64_t bytes = 4 * static_cast<uint64_t>(n);
  std::array<lapilli_buffer*, 3> buffers{};
  for (lapilli_buffer*& buffer : buffers)
    need(lapilli_buffer_create(shared.stream, bytes, &buffer) == LAPILLI_OK, "buffer");
  Floats x(static_cast<size_t>(n), value), y(x.size());
  for (int i = 0; i < 2; ++i)
    need(lapilli_buffer_write(buffers[static_cast<size_t>(i)], 0, x.data(), bytes) == LAPILLI_OK, "write");
  const std::array<lapilli_slice, 2> in{{{buffers[0], 0}, {buffers[1], 0}}};
  const lapilli_slice out{buffers[2], 0};
  for (int i = 0; i < 3; ++i)
    need(lapilli_enqueue(shared.stream, shared.sum, 0, &n, 1, in.data(), 2, &out, 1) == LAPILLI_OK, "enqueue");
  lapilli_buffer *one = nullptr, *result = nullptr; // a state, on either stream
  lapilli_stream* const stream = random() % 2 == 0 ? shared.stream : shared.other;
  Floats four{1, 0, 0, 0};
  need(lapilli_buffer_create(stream, 16, &one) == LAPILLI_OK &&
           lapilli_buffer_create(stream, 16, &result) == LAPILLI_OK &&
           lapilli_buffer_write(one, 0, four.data(), 16) == LAPILLI_OK,
       "small buffers");
  const lapilli_slice from{one, 0}, to{result, 0};
  need(lapilli_enqueue(stream, shared.states, 0, nullptr, 0, &from, 1, &to, 1) == LAPILLI_OK, "enqueue state");
  ++shared.added;
  lapilli_buffer_destroy(one);
  lapilli_buffer_destroy(result);
  need(lapilli_buffer_read(buffers[2], 0, y.data(), bytes) == LAPILLI_OK && y == Floats(y.size(), 2 * value),
       "a wrong sum");
  for (lapilli_buffer* buffer : buffers)
    lapilli_buffer_destroy(buffer);
  if (random() % 8 == 0)
    need(lapilli_empty_cache(shared.stream) == LAPILLI_OK, "empty_cache");
}

} // namespace

static double seconds = 3;

TEST(everything_from_many_threads) {
  const Program sample(sample_program({.texel = true})), states(state_program()), sum(sum_program());
  Shared shared{sample.handle, states.handle, sum.handle, nullptr, nullptr, 0};
  lapilli_load_options options{};
  options.validation = with_validation ? 1 : 0;
  CHECK(lapilli_stream_create(&options, &shared.stream) == LAPILLI_OK);
  CHECK(lapilli_stream_create(&options, &shared.other) == LAPILLI_OK);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 6; ++id)
    threads.emplace_back([&shared, id, end] {
      std::mt19937 random(id);
      while (std::chrono::steady_clock::now() < end) {
        const auto what = random() % 6;
        if (what < 2) {
          runs(shared.sample, random, what == 1);
        } else if (what == 2) {
          const Program own(sample_program());
          runs(own.handle, random, true);
        } else if (what == 3) {
          Floats x{1, 0, 0, 0}, y(4);
          const lapilli_tensor in = tensor(x, {4});
          lapilli_tensor out = tensor(y, {4});
          need(lapilli_run_sync(shared.states, 0, &in, 1, &out, 1) == LAPILLI_OK, "run of states");
          ++shared.added;
        } else if (what == 4) {
          Floats state(4);
          need(lapilli_state_read(shared.states, 0, state.data(), 16) == LAPILLI_OK, "state_read");
          lapilli_memory_info memory{};
          need(lapilli_program_memory(shared.sample, &memory) == LAPILLI_OK, "memory");
        } else {
          on_stream(shared, random, static_cast<float>(id));
        }
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  Floats state(4);
  CHECK(lapilli_state_read(shared.states, 0, state.data(), 16) == LAPILLI_OK);
  CHECK(state[0] == 1 + static_cast<float>(shared.added)); // none is lost
  CHECK(wrong == 0);
  lapilli_stream_destroy(shared.stream);
  lapilli_stream_destroy(shared.other);
}

TEST(validation_has_nothing_to_say) { CHECK(nothing_was_reported()); }

int main(int argc, char** argv) {
  if (argc > 1 && std::atof(argv[1]) > 0) {
    seconds = std::atof(argv[1]);
    argc = 1;
  }
  try_validation();
  return run_tests(argc, argv);
}
