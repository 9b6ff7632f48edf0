// Programs on a device, through the C ABI.

#include "floats.h"
#include "loaded.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <thread>

namespace {

bool is_sample_result(const std::vector<float>& x, const float* y, uint32_t width) {
  for (size_t i = 0; i < x.size(); ++i)
    if (std::abs(y[i] - sample_result(x[i], static_cast<uint32_t>(i % width))) > 1e-3f * (1.0f + std::abs(y[i])))
      return false;
  return true;
}

lapilli_status run_once(lapilli_program* program, int64_t batch, uint32_t width, unsigned seed, bool& correct) {
  std::vector<float> x = random_values(static_cast<size_t>(batch) * width, seed), y(x.size());
  const lapilli_tensor input = tensor(x, {batch, width});
  lapilli_tensor output = tensor(y, {});
  const lapilli_status status = lapilli_run_sync(program, 0, &input, 1, &output, 1);
  correct = status == LAPILLI_OK && output.rank == 2 && output.shape[0] == batch && output.shape[1] == width &&
            output.size == y.size() * sizeof(float) && is_sample_result(x, y.data(), width);
  return status;
}

void check_run(lapilli_program* program, int64_t batch, uint32_t width = 7, unsigned seed = 1) {
  bool correct = false;
  CHECK(run_once(program, batch, width, seed, correct) == LAPILLI_OK);
  CHECK(correct);
}

} // namespace

TEST(devices_are_listed) {
  char* json = nullptr;
  CHECK(lapilli_devices(&json) == LAPILLI_OK);
  CHECK(json != nullptr && std::string(json).find("\"name\"") != std::string::npos);
  lapilli_free(json);
}

TEST(every_size_runs) {
  const Program program(sample_program());
  CHECK(program.status == LAPILLI_OK);
  for (const int64_t batch : {1, 16, 2, 7, 0, 3, 3, 16})
    check_run(program.handle, batch);
  lapilli_memory_info memory{};
  CHECK(lapilli_program_memory(program.handle, &memory) == LAPILLI_OK);
  CHECK(memory.constants > 0 && memory.arena > 0 && memory.arena_sum >= memory.arena && memory.io > 0);
  CHECK(memory.device_total >= memory.constants + memory.arena + memory.io);
  lapilli_load_times times{};
  CHECK(lapilli_program_load_times(program.handle, &times) == LAPILLI_OK);
  CHECK(times.total >= times.open + times.device);
}

TEST(texel_buffers_are_read) {
  const Program program(sample_program({.texel = true}));
  CHECK(program.status == LAPILLI_OK);
  for (const int64_t batch : {1, 5, 16, 0})
    check_run(program.handle, batch);
}

TEST(results_are_identical_bits) {
  const Program program(sample_program({.width = 1000}));
  std::vector<float> x = random_values(4000, 5), first;
  for (int i = 0; i < 10; ++i) {
    std::vector<float> y(x.size());
    const lapilli_tensor input = tensor(x, {4, 1000});
    lapilli_tensor output = tensor(y, {});
    CHECK(lapilli_run_sync(program.handle, 0, &input, 1, &output, 1) == LAPILLI_OK);
    if (first.empty())
      first = y;
    CHECK(std::memcmp(first.data(), y.data(), y.size() * sizeof(float)) == 0);
  }
}

TEST(a_file_is_loaded) {
  const std::string path = (std::filesystem::temp_directory_path() / "lapilli_test.lap").string();
  write_file(path, sample_program({.width = 100000}));
  lapilli_load_options options{};
  options.validation = with_validation ? 1 : 0;
  lapilli_program* program = nullptr;
  CHECK(lapilli_load(path.c_str(), &options, &program) == LAPILLI_OK);
  std::filesystem::remove(path); // it is not needed any more
  check_run(program, 2, 100000);
  lapilli_destroy(program);
  CHECK(lapilli_load(path.c_str(), &options, &program) == LAPILLI_IO_ERROR);
  CHECK(lapilli_load("/", &options, &program) == LAPILLI_IO_ERROR);
  CHECK(lapilli_load("/dev/null", &options, &program) == LAPILLI_IO_ERROR);
  CHECK(lapilli_load(nullptr, &options, &program) == LAPILLI_INVALID_ARGUMENT);
}

TEST(constants_larger_than_the_staging_buffer) {
  lapilli_load_options options{};
  options.staging_size = 1; // the smallest there is: 64 KiB
  const Program program(sample_program({.width = 300000}), options);
  CHECK(program.status == LAPILLI_OK);
  check_run(program.handle, 2, 300000);
}

TEST(many_runs_in_flight) {
  const Program program(sample_program());
  std::vector<lapilli_run*> runs;
  std::vector<std::vector<float>> inputs;
  for (int64_t i = 0; i < 12; ++i) {
    const int64_t batch = 1 + i % 4;
    inputs.push_back(random_values(static_cast<size_t>(batch) * 7, static_cast<unsigned>(i)));
    const lapilli_tensor input = tensor(inputs.back(), {batch, 7});
    lapilli_run* run = nullptr;
    CHECK(lapilli_submit(program.handle, 0, &input, 1, &run) == LAPILLI_OK);
    runs.push_back(run);
  }
  for (size_t i = runs.size(); i-- > 0;) {
    CHECK(lapilli_wait(runs[i], UINT64_MAX) == LAPILLI_OK);
    lapilli_tensor output{};
    CHECK(lapilli_output(runs[i], 0, &output) == LAPILLI_OK);
    CHECK(output.size == inputs[i].size() * sizeof(float));
    CHECK(is_sample_result(inputs[i], static_cast<const float*>(output.data), 7));
    CHECK(lapilli_output(runs[i], 1, &output) == LAPILLI_INVALID_ARGUMENT);
  }
  for (lapilli_run* run : runs)
    lapilli_release(run);
  check_run(program.handle, 5);
}

TEST(threads_share_programs) {
  const Program first(sample_program()), second(sample_program({.width = 33}));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 40; ++i) {
        const bool one = (t + i) % 2 == 0;
        bool correct = false;
        run_once(one ? first.handle : second.handle, 1 + (t * 7 + i) % 16, one ? 7 : 33, t * 100 + i, correct);
        wrong += correct ? 0 : 1;
        if (i % 10 == 0) {
          const Program own(sample_program({.width = 3}));
          run_once(own.handle, 2, 3, i, correct);
          wrong += correct ? 0 : 1;
        }
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  CHECK(wrong == 0);
}

TEST(waiting_has_a_limit) {
  Program program(slow_program(400));
  CHECK(program.status == LAPILLI_OK);
  std::vector<float> x{42.5f};
  const lapilli_tensor input = tensor(x, {1});
  lapilli_run *run = nullptr, *other = nullptr;
  CHECK(lapilli_submit(program.handle, 0, &input, 1, &run) == LAPILLI_OK);
  CHECK(lapilli_submit(program.handle, 0, &input, 1, &other) == LAPILLI_OK);
  lapilli_tensor output{};
  CHECK(lapilli_wait(run, 1000) == LAPILLI_TIMEOUT);
  CHECK(lapilli_output(run, 0, &output) == LAPILLI_INVALID_ARGUMENT);
  CHECK(lapilli_wait(run, UINT64_MAX) == LAPILLI_OK);
  CHECK(lapilli_output(run, 0, &output) == LAPILLI_OK);
  CHECK(*static_cast<const float*>(output.data) == 42.5f);
  program.destroy(); // waits for the other run, and the runs stay valid until they are released
  CHECK(lapilli_wait(other, 0) == LAPILLI_OK);
  CHECK(lapilli_output(other, 0, &output) == LAPILLI_OK);
  CHECK(*static_cast<const float*>(output.data) == 42.5f);
  lapilli_release(run);
  lapilli_release(other);
}

TEST(wrong_inputs_are_explained) {
  const Program program(sample_program());
  std::vector<float> x(200), y(200);
  lapilli_tensor output = tensor(y, {});
  const auto refused = [&](lapilli_tensor input, uint32_t count, const char* words) {
    const lapilli_tensor inputs[] = {input, input};
    CHECK(lapilli_run_sync(program.handle, 0, inputs, count, &output, 1) == LAPILLI_INVALID_ARGUMENT);
    lapilli_run* run = nullptr;
    CHECK(lapilli_submit(program.handle, 0, inputs, count, &run) == LAPILLI_INVALID_ARGUMENT);
    const std::string message = lapilli_last_error();
    if (message.find(words) == std::string::npos) {
      std::fprintf(stderr, "message: %s\n", message.c_str());
      CHECK(false);
    }
  };
  std::vector<float> three(21);
  const lapilli_tensor good = tensor(three, {3, 7});
  refused(good, 2, "takes 1 input");
  refused(good, 0, "takes 1 input");
  lapilli_tensor bad = good;
  bad.dtype = LAPILLI_INT32;
  refused(bad, 1, "given as int32");
  bad.dtype = 77;
  refused(bad, 1, "unknown dtype");
  bad = good;
  bad.rank = 3;
  refused(bad, 1, "3 dimensions");
  bad.rank = 99;
  refused(bad, 1, "99 dimensions");
  bad = good;
  bad.shape[0] = 17;
  refused(bad, 1, "N in 0..16");
  refused(bad, 1, "N = 17");
  bad.shape[0] = -1;
  refused(bad, 1, "N in 0..16");
  bad = good;
  bad.shape[1] = 8;
  refused(bad, 1, "(3, 8)");
  bad = good;
  bad.size = 20;
  refused(bad, 1, "20 bytes");
  bad = good;
  bad.data = nullptr;
  refused(bad, 1, "null");
  CHECK(lapilli_run_sync(program.handle, 1, &good, 1, &output, 1) == LAPILLI_INVALID_ARGUMENT);
  CHECK(lapilli_run_sync(program.handle, 0, &good, 1, &output, 0) == LAPILLI_INVALID_ARGUMENT);
  CHECK(lapilli_run_sync(nullptr, 0, &good, 1, &output, 1) == LAPILLI_INVALID_ARGUMENT);
  output.size = 8;
  CHECK(lapilli_run_sync(program.handle, 0, &good, 1, &output, 1) == LAPILLI_INVALID_ARGUMENT);
  CHECK(output.size == 84 && output.rank == 2 && output.shape[0] == 3);
  check_run(program.handle, 3);
}

TEST(sizes_derived_from_a_symbol) {
  const Program program(sample_program({.max_batch = 4, .factor = 2, .offset = 1}));
  CHECK(program.status == LAPILLI_OK);
  for (const int64_t rows : {1, 9, 3, 7, 1})
    check_run(program.handle, rows);
  const auto refused = [&](int64_t rows, const char* words) {
    std::vector<float> x(static_cast<size_t>(7 * rows));
    const lapilli_tensor input = tensor(x, {rows, 7});
    lapilli_run* run = nullptr;
    CHECK(lapilli_submit(program.handle, 0, &input, 1, &run) == LAPILLI_INVALID_ARGUMENT);
    const std::string message = lapilli_last_error();
    if (message.find(words) == std::string::npos || message.find("with N in 0..4") == std::string::npos) {
      std::fprintf(stderr, "message: %s\n", message.c_str());
      CHECK(false);
    }
  };
  refused(11, "N = 5");
  refused(4, "no whole N gives 4");
  refused(0, "no whole N gives 0");
}

TEST(specs_say_what_is_accepted) {
  const Program program(sample_program());
  CHECK(lapilli_method_count(program.handle) == 1);
  lapilli_method_info info{};
  CHECK(lapilli_method(program.handle, 0, &info) == LAPILLI_OK);
  CHECK(std::string(info.name) == "forward" && info.inputs == 1 && info.outputs == 1 && info.commands == 3);
  lapilli_spec spec{};
  CHECK(lapilli_input_spec(program.handle, 0, 0, &spec) == LAPILLI_OK);
  CHECK(spec.rank == 2 && spec.shape[0] == -1 && spec.min[0] == 0 && spec.max[0] == 16 && spec.shape[1] == 7);
  CHECK(lapilli_output_spec(program.handle, 0, 0, &spec) == LAPILLI_OK && std::string(spec.name) == "y");
  CHECK(lapilli_input_spec(program.handle, 0, 1, &spec) == LAPILLI_INVALID_ARGUMENT);
}

TEST(the_first_possible_plan_is_taken) {
  const Program program(sample_program({.impossible_first = true}));
  CHECK(program.status == LAPILLI_OK);
  const std::string info = program.info();
  CHECK(info.find("\"plan\":\"portable\"") != std::string::npos);
  CHECK(info.find("\"plan\":\"impossible\",\"reasons\":[") != std::string::npos);
  check_run(program.handle, 2);

  const Program none(sample_program({.impossible_only = true}));
  CHECK(none.status == LAPILLI_NO_DEVICE);
  CHECK(none.message.find("1073741824 invocations") != std::string::npos);

  lapilli_load_options options{};
  options.plan = "impossible";
  CHECK(Program(sample_program({.impossible_first = true}), options).status == LAPILLI_NO_DEVICE);
  options.plan = "other";
  const Program other(sample_program(), options);
  CHECK(other.status == LAPILLI_INVALID_ARGUMENT && other.message.find("portable") != std::string::npos);
}

TEST(devices_are_chosen_by_name_and_index) {
  lapilli_load_options options{};
  options.device = "no such device";
  const Program none(sample_program(), options);
  CHECK(none.status == LAPILLI_NO_DEVICE && none.message.find("0 (") != std::string::npos);
  options.device = "99";
  CHECK(Program(sample_program(), options).status == LAPILLI_NO_DEVICE);
  options.device = "0";
  CHECK(Program(sample_program(), options).status == LAPILLI_OK);
}

TEST(too_much_memory_is_refused) {
  const Program program(sample_program({.scratch = int64_t{1} << 39}));
  CHECK(program.status == LAPILLI_OK);
  bool correct = false;
  CHECK(run_once(program.handle, 1, 7, 1, correct) == LAPILLI_OUT_OF_MEMORY);
  CHECK(std::string(lapilli_last_error()).find("512.0 GiB") != std::string::npos);
}

TEST(every_path_of_inputs_and_outputs) {
  for (const char* input : {"bar", "staging", "direct"})
    for (const char* output : {"direct", "staging"}) {
      const Environment in("LAPILLI_INPUT_PATH", input), out("LAPILLI_OUTPUT_PATH", output);
      const Program program(sample_program());
      CHECK(program.status == LAPILLI_OK);
      for (const int64_t batch : {2, 16, 0, 1})
        check_run(program.handle, batch);
    }
  const Environment wrong("LAPILLI_INPUT_PATH", "pigeon");
  CHECK(Program(sample_program()).status == LAPILLI_INVALID_ARGUMENT);
}

TEST(commands_are_timed) {
  const Program program(sample_program());
  std::vector<float> x = random_values(14, 3);
  const lapilli_tensor input = tensor(x, {2, 7});
  uint64_t times[3] = {}, total = 0;
  uint32_t count = 0;
  CHECK(lapilli_profile(program.handle, 0, &input, 1, 5, times, 3, &count, &total) == LAPILLI_OK);
  CHECK(count == 3 && total > 0 && times[0] > 0 && times[2] > 0);
  CHECK(lapilli_profile(program.handle, 0, &input, 1, 5, times, 2, &count, &total) == LAPILLI_INVALID_ARGUMENT);
  const lapilli_tensor empty = tensor(x, {0, 7});
  lapilli_tensor nothing = empty;
  nothing.size = 0;
  CHECK(lapilli_profile(program.handle, 0, &nothing, 1, 2, times, 3, &count, &total) == LAPILLI_OK);
  CHECK(times[0] == 0);
}

TEST(buffers_are_read) {
  const Program program(sample_program());
  std::vector<float> x = random_values(14, 3), values(14);
  const lapilli_tensor input = tensor(x, {2, 7});
  const auto read = [&](uint32_t command, uint32_t buffer, uint64_t size) {
    return lapilli_read_buffer(program.handle, 0, &input, 1, command, buffer, values.data(), size);
  };
  CHECK(read(0, 4, 56) == LAPILLI_OK); // x + 3 w
  for (size_t i = 0; i < values.size(); ++i)
    CHECK(std::abs(values[i] - (x[i] + 3.0f * static_cast<float>(i % 7))) < 1e-3f);
  CHECK(read(2, 6, 56) == LAPILLI_OK); // the output
  CHECK(is_sample_result(x, values.data(), 7));
  CHECK(read(0, 1, 28) == LAPILLI_OK && values[2] == 6.0f); // packed weights
  CHECK(read(0, 0, 28) == LAPILLI_INVALID_ARGUMENT);        // is gone after load
  CHECK(read(3, 4, 56) == LAPILLI_INVALID_ARGUMENT);
  CHECK(read(0, 99, 4) == LAPILLI_INVALID_ARGUMENT);
  CHECK(read(0, 4, 57) == LAPILLI_INVALID_ARGUMENT);
}

TEST(a_damaged_pipeline_cache_is_ignored) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "lapilli_test_cache";
  std::filesystem::remove_all(folder);
  const std::string name = folder.string();
  lapilli_load_options options{};
  options.cache_dir = name.c_str();
  CHECK(Program(sample_program(), options).status == LAPILLI_OK);
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files.push_back(entry.path());
  CHECK(files.size() == 1); // and no temporary file
  if (files.empty())
    return;
  const FileBytes good = read_file(files[0].string());
  CHECK(Program(sample_program(), options).info().find("\"found\":true") != std::string::npos);
  for (const size_t keep : {size_t{0}, size_t{10}, good.size() - 1, good.size()}) {
    FileBytes bad(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(keep));
    if (keep == good.size())
      bad[keep - 5] ^= std::byte{1};
    write_file(files[0].string(), bad);
    const Program program(sample_program(), options);
    CHECK(program.status == LAPILLI_OK);
    CHECK(program.info().find("\"found\":false") != std::string::npos);
    check_run(program.handle, 1);
  }
  CHECK(Program(sample_program(), options).info().find("\"found\":true") != std::string::npos); // it was replaced
  std::filesystem::remove_all(folder);
  const std::string impossible = "/proc/no/such/folder";
  options.cache_dir = impossible.c_str();
  CHECK(Program(sample_program(), options).status == LAPILLI_OK);
  options.cache_dir = "";
  CHECK(Program(sample_program(), options).status == LAPILLI_OK);
}

namespace {

using Four = std::vector<float>;

// One run of a method of `state_program`.
Four run_state(lapilli_program* program, uint32_t method, Four x = {}) {
  Four y(4, -1);
  const lapilli_tensor input = tensor(x, {4});
  lapilli_tensor output = tensor(y, {});
  CHECK(lapilli_run_sync(program, method, &input, method == 0 ? 1 : 0, &output, 1) == LAPILLI_OK);
  return y;
}

} // namespace

TEST(states_are_kept_between_runs) {
  const Program program(state_program()), other(state_program());
  CHECK(program.status == LAPILLI_OK && other.status == LAPILLI_OK);
  CHECK(run_state(program.handle, 1) == Four({1, 2, 3, 4}));
  CHECK(run_state(program.handle, 0, {1, 1, 1, 1}) == Four({2, 3, 4, 5}));
  CHECK(run_state(program.handle, 0, {1, 0, 0, 9}) == Four({3, 3, 4, 14}));
  CHECK(run_state(program.handle, 1) == Four({3, 3, 4, 14})); // another method sees the same state
  CHECK(run_state(other.handle, 1) == Four({1, 2, 3, 4}));    // another program does not
  CHECK(lapilli_reset(program.handle) == LAPILLI_OK);
  CHECK(run_state(program.handle, 1) == Four({1, 2, 3, 4}));
  CHECK(program.info().find("\"states\":[\"total\",\"rest\"]") != std::string::npos);
  lapilli_memory_info memory{};
  CHECK(lapilli_program_memory(program.handle, &memory) == LAPILLI_OK && memory.states >= 48);
}

TEST(states_are_read_and_written) {
  const Program program(state_program());
  CHECK(lapilli_state_count(program.handle) == 2 && lapilli_state_count(nullptr) == 0);
  lapilli_spec spec{};
  CHECK(lapilli_state_spec(program.handle, 1, &spec) == LAPILLI_OK);
  CHECK(std::string(spec.name) == "rest" && spec.rank == 1 && spec.shape[0] == 4 && spec.dtype == LAPILLI_FLOAT32);
  CHECK(lapilli_state_spec(program.handle, 2, &spec) == LAPILLI_INVALID_ARGUMENT);
  Four values(4, 7);
  CHECK(lapilli_state_read(program.handle, 1, values.data(), 16) == LAPILLI_OK);
  CHECK(values == Four({0, 0, 0, 0}));
  values = {5, 6, 7, 8};
  CHECK(lapilli_state_write(program.handle, 0, values.data(), 16) == LAPILLI_OK);
  CHECK(run_state(program.handle, 0, {1, 0, 0, 0}) == Four({6, 6, 7, 8}));
  CHECK(lapilli_state_read(program.handle, 0, values.data(), 16) == LAPILLI_OK);
  CHECK(values == Four({6, 6, 7, 8}));
  CHECK(lapilli_state_read(program.handle, 0, values.data(), 12) == LAPILLI_INVALID_ARGUMENT);
  CHECK(lapilli_state_write(program.handle, 0, nullptr, 16) == LAPILLI_INVALID_ARGUMENT);
  CHECK(lapilli_state_write(program.handle, 2, values.data(), 16) == LAPILLI_INVALID_ARGUMENT);
}

TEST(runs_with_states_take_place_in_order) {
  const Program program(state_program());
  std::vector<lapilli_run*> runs;
  Four x{1, 2, 3, 4};
  for (int i = 0; i < 16; ++i) {
    const lapilli_tensor input = tensor(x, {4});
    runs.emplace_back();
    CHECK(lapilli_submit(program.handle, 0, &input, 1, &runs.back()) == LAPILLI_OK);
  }
  for (size_t i = runs.size(); i-- > 0;) {
    CHECK(lapilli_wait(runs[i], UINT64_MAX) == LAPILLI_OK);
    lapilli_tensor output{};
    CHECK(lapilli_output(runs[i], 0, &output) == LAPILLI_OK);
    CHECK(static_cast<const float*>(output.data)[3] == 4.0f * static_cast<float>(i + 2));
    lapilli_release(runs[i]);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 25; ++i)
        run_state(program.handle, 0, {0, 0, 0, 1});
    });
  for (std::thread& thread : threads)
    thread.join();
  CHECK(run_state(program.handle, 1) == Four({17, 34, 51, 168}));
}

TEST(profiles_and_buffers_leave_states_alone) {
  const Program program(state_program());
  Four x{1, 1, 1, 1}, values(4);
  const lapilli_tensor input = tensor(x, {4});
  uint64_t times[2] = {}, total = 0;
  uint32_t count = 0;
  CHECK(lapilli_profile(program.handle, 0, &input, 1, 3, times, 2, &count, &total) == LAPILLI_OK);
  CHECK(lapilli_read_buffer(program.handle, 0, &input, 1, 0, 0, values.data(), 16) == LAPILLI_OK);
  CHECK(values == Four({2, 3, 4, 5})); // within the run
  CHECK(run_state(program.handle, 1) == Four({1, 2, 3, 4}));
}

TEST(states_that_do_not_fit_are_refused) {
  const Program small(state_program({.buffer_bytes = 12}));
  CHECK(small.status == LAPILLI_INVALID_FILE && small.message.find("smaller than what it is for") != std::string::npos);
  const Program large(state_program({.constant = -1, .size = 0xfffffff0u}));
  CHECK(large.status == LAPILLI_INVALID_FILE || large.status == LAPILLI_OUT_OF_MEMORY);
  const Program begins_as_zeros(state_program({.constant = -1}));
  CHECK(run_state(begins_as_zeros.handle, 0, {1, 2, 3, 4}) == Four({1, 2, 3, 4}));
}

TEST(checks_of_integers_fail_runs) {
  const Program program(checked_program());
  CHECK(program.status == LAPILLI_OK);
  lapilli_method_info info{};
  CHECK(lapilli_method(program.handle, 0, &info) == LAPILLI_OK && info.outputs == 1);
  lapilli_spec spec{};
  CHECK(lapilli_output_spec(program.handle, 0, 1, &spec) == LAPILLI_INVALID_ARGUMENT);
  CHECK(run_state(program.handle, 0, {0, 2, 3, 4}) == Four({0, 2, 3, 4}));
  Four x{1, 2, 3, 4}, y(4, -1);
  const lapilli_tensor input = tensor(x, {4});
  lapilli_tensor output = tensor(y, {});
  CHECK(lapilli_run_sync(program.handle, 0, &input, 1, &output, 1) == LAPILLI_OUT_OF_RANGE);
  CHECK(std::string(lapilli_last_error()).find("do not fit into the 32 bits") != std::string::npos);
  CHECK(y == Four(4, -1)); // nothing was written
  lapilli_run* run = nullptr;
  CHECK(lapilli_submit(program.handle, 0, &input, 1, &run) == LAPILLI_OK);
  CHECK(lapilli_wait(run, UINT64_MAX) == LAPILLI_OUT_OF_RANGE);
  CHECK(lapilli_output(run, 1, &output) == LAPILLI_INVALID_ARGUMENT);
  lapilli_release(run);
  CHECK(Program(checked_program({.result = false})).status == LAPILLI_INVALID_FILE);
  CHECK(Program(checked_program({.limit = -1})).status == LAPILLI_INVALID_FILE);
}

TEST(sizes_are_given) {
  const Program program(state_program());
  const auto submit = [&](uint32_t method, std::vector<int64_t> sizes, lapilli_run** run) {
    return lapilli_submit_sized(program.handle, method, sizes.data(), static_cast<uint32_t>(sizes.size()), nullptr, 0,
                                run);
  };
  for (const int64_t n : {3, 0, 4, 1}) {
    lapilli_run* run = nullptr;
    CHECK(submit(2, {n}, &run) == LAPILLI_OK);
    CHECK(lapilli_wait(run, UINT64_MAX) == LAPILLI_OK);
    lapilli_tensor output{};
    CHECK(lapilli_output(run, 0, &output) == LAPILLI_OK);
    CHECK(output.rank == 1 && output.shape[0] == n);
    for (int64_t i = 0; i < n; ++i)
      CHECK(static_cast<const float*>(output.data)[i] == static_cast<float>(i + 1));
    lapilli_release(run);
    CHECK(submit(3, {n}, &run) == LAPILLI_OK); // no commands, no outputs
    CHECK(lapilli_wait(run, UINT64_MAX) == LAPILLI_OK);
    lapilli_release(run);
  }
  const auto refused = [](lapilli_status status, const char* words) {
    return status == LAPILLI_INVALID_ARGUMENT && std::string(lapilli_last_error()).find(words) != std::string::npos;
  };
  lapilli_run* run = nullptr;
  CHECK(refused(submit(2, {}, &run), "must be given the sizes N, which its inputs do not show; 0 were given"));
  CHECK(refused(submit(2, {1, 2}, &run), "; 2 were given"));
  CHECK(refused(submit(0, {1}, &run), "takes 1 input"));
  CHECK(refused(submit(1, {1}, &run), "must be given no sizes; 1 were given"));
  CHECK(refused(submit(2, {5}, &run), "Symbol N of method \"size\" is 5, and the method takes 0..4"));
  CHECK(refused(submit(2, {-1}, &run), "is -1"));
  CHECK(refused(lapilli_submit_sized(program.handle, 2, nullptr, 1, nullptr, 0, &run), "sizes"));
  int64_t symbol = 3;
  CHECK(lapilli_symbols(program.handle, 2, nullptr, 0, &symbol, 1) == LAPILLI_OK && symbol == 3);
  symbol = 5;
  CHECK(refused(lapilli_symbols(program.handle, 2, nullptr, 0, &symbol, 1), "is 5, and the method takes 0..4"));
  CHECK(refused(lapilli_symbols(program.handle, 2, nullptr, 0, &symbol, 0), "has 1 symbols, and room for 0 was given"));
  Four y(4, -1);
  lapilli_tensor output = tensor(y, {});
  uint32_t count = 9;
  uint64_t total = 0, times[4];
  CHECK(refused(lapilli_run_sync(program.handle, 2, nullptr, 0, &output, 1), "must be given the sizes N"));
  CHECK(refused(lapilli_submit(program.handle, 2, nullptr, 0, &run), "must be given the sizes N"));
  CHECK(refused(lapilli_profile(program.handle, 2, nullptr, 0, 2, times, 4, &count, &total),
                "must be given the sizes N"));
  CHECK(refused(lapilli_read_buffer(program.handle, 2, nullptr, 0, 0, 0, y.data(), 4), "must be given the sizes N"));
}

TEST(host_operators_must_be_allowed) {
  const FileBytes file = state_program({.host_operators = {"aten.linalg_svd", "aten.unique"}});
  const Program refused(file);
  CHECK(refused.status == LAPILLI_UNSUPPORTED);
  CHECK(refused.message.find("aten.linalg_svd and aten.unique") != std::string::npos ||
        refused.message.find("aten.linalg_svd, aten.unique") != std::string::npos);
  CHECK(refused.message.find("fallback=\"error\"") != std::string::npos);
  lapilli_load_options options{};
  options.allow_host = 1;
  const Program allowed(file, options);
  CHECK(allowed.status == LAPILLI_OK);
  CHECK(run_state(allowed.handle, 1) == Four({1, 2, 3, 4}));
  CHECK(allowed.info().find("\"host_operators\":[\"aten.linalg_svd\",\"aten.unique\"]") != std::string::npos);
}

// In a child every call fails at once, also with work in flight; what needs no device works, and the child ends.
TEST(forked_children_are_told) {
  Program slow(slow_program(200));
  const Program states(state_program());
  lapilli_stream* stream = nullptr;
  lapilli_load_options options{};
  options.validation = with_validation ? 1 : 0;
  CHECK(lapilli_stream_create(&options, &stream) == LAPILLI_OK);
  lapilli_buffer* buffer = nullptr;
  CHECK(lapilli_buffer_create(stream, 16, &buffer) == LAPILLI_OK);
  CHECK(lapilli_buffer_fill(buffer, 0, 16, 0) == LAPILLI_OK); // queued
  std::vector<float> x{1}, four(4), y(200);
  const lapilli_tensor input = tensor(x, {1}), in = tensor(four, {4});
  lapilli_tensor output = tensor(four, {});
  lapilli_run* run = nullptr;
  CHECK(lapilli_submit(slow.handle, 0, &input, 1, &run) == LAPILLI_OK);
  const FileBytes file = state_program();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60); // a call that waits would end the child
    const int before = failures;
    const auto refused = [](lapilli_status status) {
      return status == LAPILLI_DEVICE_LOST && std::strstr(lapilli_last_error(), "forked") != nullptr;
    };
    char* json = nullptr;
    lapilli_tensor result{};
    lapilli_run* other = nullptr;
    lapilli_program* program = nullptr;
    lapilli_stream* another = nullptr;
    lapilli_buffer* created = nullptr;
    uint64_t total = 0;
    uint32_t count = 0;
    const lapilli_slice slice{buffer, 0};
    const std::array<int64_t, 8> words{};
    CHECK(lapilli_describe(file.data(), file.size(), 0, nullptr, &json) == LAPILLI_OK);
    lapilli_free(json);
    CHECK(refused(lapilli_devices(&json)));
    CHECK(refused(lapilli_load_memory(file.data(), file.size(), &options, &program)));
    CHECK(refused(lapilli_run_sync(states.handle, 0, &in, 1, &output, 1)));
    CHECK(refused(lapilli_submit(states.handle, 0, &in, 1, &other)));
    CHECK(refused(lapilli_wait(run, UINT64_MAX)) && refused(lapilli_output(run, 0, &result)));
    CHECK(refused(lapilli_state_read(states.handle, 0, four.data(), 16)) && refused(lapilli_reset(states.handle)));
    CHECK(refused(lapilli_profile(states.handle, 0, &in, 1, 1, &total, 1, &count, &total)));
    CHECK(refused(lapilli_program_info(states.handle, &json)));
    CHECK(refused(lapilli_stream_create(&options, &another)));
    CHECK(refused(lapilli_buffer_create(stream, 4, &created)) && lapilli_buffer_acquire(stream, 4) == 0);
    CHECK(refused(lapilli_buffer_write(buffer, 0, four.data(), 16)));
    CHECK(refused(lapilli_buffer_read(buffer, 0, four.data(), 16)));
    CHECK(refused(lapilli_enqueue(stream, states.handle, 0, nullptr, 0, &slice, 1, &slice, 1)));
    CHECK(lapilli_launch(stream, states.handle, reinterpret_cast<const char*>(words.data())) == 0);
    CHECK(refused(lapilli_flush(stream)) && refused(lapilli_synchronize(stream)) &&
          refused(lapilli_empty_cache(stream)));
    lapilli_release(run);
    lapilli_destroy(states.handle);
    lapilli_buffer_destroy(buffer);
    lapilli_stream_destroy(stream);
    std::exit(failures - before);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(lapilli_wait(run, UINT64_MAX) == LAPILLI_OK); // the parent goes on
  lapilli_release(run);
  CHECK(lapilli_run_sync(states.handle, 0, &in, 1, &output, 1) == LAPILLI_OK);
  lapilli_buffer_destroy(buffer);
  lapilli_stream_destroy(stream);
}

TEST(programs_come_and_go) {
  for (int i = 0; i < 20; ++i) {
    const Program program(sample_program());
    check_run(program.handle, 1 + i % 16);
  }
}

// Last: nothing above was reported.
TEST(validation_has_nothing_to_say) { CHECK(nothing_was_reported()); }

int main(int argc, char** argv) {
  try_validation();
  return run_tests(argc, argv);
}
