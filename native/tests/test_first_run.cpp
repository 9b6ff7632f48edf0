// The first-run check, on a device without a driver whose kernels are wrong on purpose.

#include "core/first_run.h"
#include "null.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

using namespace lapilli;

namespace {

// A folder for verdicts, empty at the beginning of a test.
class Folder {
public:
  Folder() : path_(std::filesystem::temp_directory_path() / cat("lapilli-first-run-", nanoseconds_now())) {}
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  lapilli_load_options options() {
    text_ = path_.string();
    lapilli_load_options given{};
    given.cache_dir = text_.c_str();
    return given;
  }
  std::vector<std::filesystem::path> verdicts() const {
    std::vector<std::filesystem::path> files;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(path_ / "verdicts", none))
      files.push_back(entry.path());
    return files;
  }

private:
  std::filesystem::path path_;
  std::string text_;
};

using Change = std::function<void(float*, uint32_t)>;

// A device on which `change` spoils what the kernel with this index writes.
std::shared_ptr<null::Device> wrong_device(uint32_t kernel, Change change) {
  auto device = null_device();
  device->kernel = [=](const null::Command& command) {
    compute(command);
    if (command.kernel == kernel)
      change(null::data_of<float>(command.bindings.back()), command.params[0]);
  };
  return device;
}
// Other results in each run.
void drift(float* y, uint32_t) {
  static float count = 0;
  count += 1;
  y[0] += count;
}
constexpr uint32_t in_both = 0, fast = 2; // kernels of the sample

std::shared_ptr<lapilli::Program> check(const FileBytes& file, const std::shared_ptr<null::Device>& device,
                                        const lapilli_load_options& options) {
  const Source source{Bytes(file)};
  return load_checked(source, options, nanoseconds_now(), [&] { return device; });
}

size_t runs_on(const null::Device& device) { // of the last kernel of either plan
  size_t count = 0;
  for (const Recorded& commands : device.submitted)
    count += only(commands, Kind::dispatch).size() == 3 ? 1 : 0;
  return count;
}

bool computes(lapilli::Program& program) {
  const Floats x{1, 2, 3, 4, 5, 6, 7}, y = run(program, 0, {tensor(x, {1, 7})});
  for (uint32_t i = 0; i < 7; ++i)
    if (y[i] != sample_result(x[i], i))
      return false;
  return true;
}

} // namespace

TEST(a_right_device_keeps_its_plan) {
  Folder folder;
  const auto device = wrong_device(UINT32_MAX, {});
  const FileBytes file = sample_program({.fast_first = true});
  for (int start = 0; start < 2; ++start) {
    device->submitted.clear();
    const auto program = check(file, device, folder.options());
    CHECK(program->plan(0).name == "fast" && program->warning().empty());
    CHECK(runs_on(*device) == (start == 0 ? 6u : 0u)); // the second start knows
    CHECK(computes(*program));
  }
  CHECK(folder.verdicts().size() == 1);
}

// One plan after the other: never both.
TEST(the_check_takes_the_memory_of_one_plan) {
  Folder folder;
  lapilli_load_options options = folder.options();
  const FileBytes file = sample_program({.width = 100'000, .fast_first = true});
  const auto alone = null_device();
  {
    const auto program = load(file, alone, options);
    const Floats x(1'600'000);
    run(*program, 0, {tensor(x, {16, 100'000})});
  }
  const auto device = null_device();
  check(file, device, options);
  CHECK(device->most_taken <= alone->most_taken);
}

TEST(a_wrong_kernel_changes_the_plan) {
  const std::vector<Change> changes{
      [](float* y, uint32_t n) { y[n - 1] += 100; },
      [](float* y, uint32_t) { y[0] = std::numeric_limits<float>::quiet_NaN(); },
      [](float* y, uint32_t) { y[0] = HUGE_VALF; },
      [](float* y, uint32_t n) { std::fill_n(y, n, 0.0f); },
      drift,
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    Folder folder;
    const auto device = wrong_device(fast, changes[i]);
    const FileBytes file = sample_program({.fast_first = true});
    for (int start = 0; start < 2; ++start) {
      device->submitted.clear();
      const auto program = check(file, device, folder.options());
      CHECK(program->plan(0).name == "portable" && computes(*program));
      CHECK(
          has(program->warning(), i < 4 ? "computes wrong, with a relative error of " : "something else in each run"));
      CHECK(has(program->warning(), "by the plan fast of this program: the slower plan portable is used instead"));
      CHECK((runs_on(*device) > 1) == (start == 0)); // one is that of computes()
    }
    // Another file, driver or plan is another question.
    const auto other = null_device();
    CHECK(check(file, other, folder.options())->plan(0).name ==
          "portable"); // the same device and driver: what was found holds
    hal::Capabilities updated = null::integrated_gpu();
    updated.driver_version += 1;
    CHECK(check(file, null_device(updated), folder.options())->plan(0).name == "fast");
    CHECK(check(sample_program({.width = 9, .fast_first = true}), other, folder.options())->warning().empty());
    CHECK(folder.verdicts().size() == 3);
  }
}

TEST(rounding_is_no_fault) {
  Folder folder;
  const auto device = wrong_device(fast, [](float* y, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i)
      y[i] *= 1 + 1e-5f;
  });
  CHECK(check(sample_program({.fast_first = true}), device, folder.options())->plan(0).name == "fast");
}

TEST(a_plan_by_name_is_refused) {
  Folder folder;
  lapilli_load_options options = folder.options();
  options.plan = "fast";
  const auto device = wrong_device(fast, [](float* y, uint32_t) { y[0] += 100; });
  const FileBytes file = sample_program({.fast_first = true});
  for (int start = 0; start < 2; ++start)
    CHECK(has(thrown([&] { check(file, device, options); }),
              "by the plan fast of this program, which was asked for by name"));
  options.plan = "portable";
  CHECK(check(file, device, options)->warning().empty());
  options.plan = nullptr; // a verdict on a choice by name says nothing of one that is free
  CHECK(check(file, device, options)->plan(0).name == "portable");
  CHECK(device->taken == 0);
}

TEST(what_is_never_the_same_is_refused) {
  for (const bool both : {false, true}) {
    Folder folder;
    const auto device = wrong_device(in_both, drift);
    for (int start = 0; start < 2; ++start)
      CHECK(has(thrown([&] { check(sample_program({.fast_first = both}), device, folder.options()); }),
                "computes something else whenever this program runs"));
    CHECK(device->taken == 0);
  }
}

TEST(without_a_folder_it_is_checked_each_time) {
  const auto device = null_device();
  lapilli_load_options options{};
  options.cache_dir = "";
  for (int start = 0; start < 2; ++start) {
    device->submitted.clear();
    check(sample_program({.fast_first = true}), device, options);
    CHECK(runs_on(*device) == 6);
  }
}

TEST(damaged_verdicts_are_made_again) {
  Folder folder;
  const FileBytes file = sample_program({.fast_first = true});
  const auto device = wrong_device(fast, [](float* y, uint32_t) { y[0] += 100; });
  check(file, device, folder.options());
  CHECK(folder.verdicts().size() == 1);
  const std::string path = folder.verdicts().front().string();
  const FileBytes whole = read_file(path);
  for (size_t i = 0; i < whole.size(); ++i) {
    FileBytes bytes = whole;
    bytes[i] ^= std::byte{1};
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    CHECK(check(file, device, folder.options())->plan(0).name == "portable");
    CHECK(read_file(path) == whole);
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(whole.data()), static_cast<std::streamsize>(i));
    CHECK(check(file, device, folder.options())->plan(0).name == "portable");
  }
}

// What has states begins with their initial values afterwards; methods whose sizes nobody knows are left out.
TEST(states_are_as_they_were) {
  Folder folder;
  const auto device = null_device();
  const auto program = check(state_program(), device, folder.options());
  CHECK(run(*program, 1, {}) == Floats({1, 2, 3, 4}));
}

// Every dtype and size has inputs, and results that are compared.
TEST(all_kinds_of_programs_are_checked) {
  Folder folder;
  const auto device = null_device();
  for (const FileBytes& file :
       {checked_program(), sum_program(), texel_program(5), sample_program({.factor = 3, .offset = 2})})
    CHECK(check(file, device, folder.options())->warning().empty());
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
