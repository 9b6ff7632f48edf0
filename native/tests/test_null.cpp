// Programs without a driver: what is placed where, bound to what, and recorded in which order.

#include "null.h"

using namespace lapilli;
using hal::Stage;

namespace {

Floats numbers(size_t count) {
  Floats values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(i);
  return values;
}

bool is_the_sample(const Floats& x, const Floats& y, uint32_t width) {
  bool same = x.size() == y.size();
  for (size_t i = 0; same && i < x.size(); ++i)
    same = y[i] == sample_result(x[i], static_cast<uint32_t>(i % width));
  return same;
}

bool lies_well(const hal::Region& region) {
  return region.offset % 256 == 0 && region.offset + region.size <= region.buffer->size();
}

} // namespace

TEST(a_run_is_recorded_in_order) {
  const auto device = null_device();
  const auto program = load(sample_program(), device);
  const Floats x = numbers(21);
  CHECK(is_the_sample(x, run(*program, 0, {tensor(x, {3, 7})}), 7));
  const Recorded& last = device->submitted.back();
  CHECK(summary(last) == "b d0 b d1 b d0 b");
  CHECK(is_ordered(last));
  CHECK(last[0].before == Stage::host_write && last[0].after == (Stage::compute_read | Stage::transfer_read));
  CHECK(last[2].before == Stage::compute_write && last[2].after == hal::compute);
  CHECK(last[6].before == Stage::compute_write && last[6].after == Stage::host_read);
  const Recorded kernels = only(last, Kind::dispatch);
  CHECK(kernels[0].params == std::vector<uint32_t>({21, 7}) && kernels[1].params == std::vector<uint32_t>({21, 2}));
  for (const auto& kernel : kernels) {
    CHECK(kernel.groups == (std::array<uint32_t, 3>{1, 1, 1}));
    for (const hal::Region& region : kernel.bindings)
      CHECK(lies_well(region));
  }
  const hal::Region &t1 = kernels[0].bindings[2], &t2 = kernels[1].bindings[1];
  CHECK(t1.size == 84 && kernels[0].bindings[1].size == 28);
  CHECK(kernels[1].bindings[0].buffer == t1.buffer && kernels[1].bindings[0].offset == t1.offset);
  CHECK(kernels[2].bindings[0].buffer == t2.buffer && kernels[2].bindings[0].offset == t2.offset);
  CHECK(!overlap(t1, t2));
  CHECK(kernels[2].bindings[2].buffer->mapped() != nullptr);
}

TEST(a_run_is_recorded_once) {
  const auto device = null_device();
  const auto program = load(sample_program(), device);
  const Floats x = numbers(21), one = numbers(7);
  const auto first_input = [&] {
    return null::data_of<float>(only(device->submitted.back(), Kind::dispatch)[0].bindings[0]);
  };
  CHECK(is_the_sample(x, run(*program, 0, {tensor(x, {3, 7})}), 7));
  const float* const place = first_input();
  CHECK(is_the_sample(one, run(*program, 0, {tensor(one, {1, 7})}), 7));
  CHECK(only(device->submitted.back(), Kind::dispatch)[0].params[0] == 7);
  CHECK(is_the_sample(x, run(*program, 0, {tensor(x, {3, 7})}), 7));
  CHECK(first_input() == place);
}

TEST(commands_without_work_are_left_out) {
  const auto device = null_device();
  const auto program = load(sample_program(), device);
  CHECK(run(*program, 0, {tensor({}, {0, 7})}).empty());
  CHECK(summary(device->submitted.back()) == "b b");
}

TEST(sets_bind_the_same) {
  for (const bool texel : {false, true}) {
    std::vector<Recorded> kernels;
    for (const bool sets : {false, true}) {
      const auto device = null_device();
      device->uses_sets = sets;
      const auto program = load(sample_program({.width = 100, .max_batch = 50, .texel = texel}), device);
      const Floats x = numbers(5000);
      CHECK(is_the_sample(x, run(*program, 0, {tensor(x, {50, 100})}), 100));
      kernels.push_back(only(device->submitted.back(), Kind::dispatch));
    }
    for (size_t i = 0; i < kernels[0].size(); ++i)
      for (size_t b = 0; b < kernels[0][i].bindings.size(); ++b) {
        const hal::Region &without = kernels[0][i].bindings[b], &with = kernels[1][i].bindings[b];
        CHECK(without.offset == with.offset && without.size == with.size);
      }
  }
}

TEST(what_the_host_does_not_see_is_copied) {
  const auto device = null_device(null::discrete_gpu());
  const auto program = load(sample_program({.width = 700, .max_batch = 200}), device);
  // Constants go through staging memory: one by a copy, one as an operand of the command that packs it.
  CHECK(summary(device->submitted.front()) == "b c b" && summary(device->submitted.back()) == "b d1 b");
  const Floats small = numbers(700), large = numbers(140'000);
  CHECK(is_the_sample(small, run(*program, 0, {tensor(small, {1, 700})}), 700));
  CHECK(summary(device->submitted.back()) == "b c b d0 b d1 b d0 b"); // a small output is written over the bus
  CHECK(is_the_sample(large, run(*program, 0, {tensor(large, {200, 700})}), 700));
  const Recorded& last = device->submitted.back();
  CHECK(summary(last) == "b c b d0 b d1 b d0 b c b");
  CHECK(is_ordered(last));
  const Recorded copies = only(last, Kind::copy);
  CHECK(copies[0].to.size == 560'000 && copies[0].from.buffer->mapped() != nullptr &&
        copies[0].to.buffer->mapped() == nullptr);
  CHECK(copies[1].to.size == 560'000 && copies[1].to.buffer->mapped() != nullptr &&
        copies[1].from.buffer->mapped() == nullptr);
}

// Constants that are larger than the staging memory go through it in pieces, whenever the device reads these: in one batch that
// is waited for when the ring is full, or in several.
TEST(constants_pass_through_bounded_memory) {
  struct Case {
    uint32_t width;
    uint64_t staging, given; // the smallest there is is 64 KiB
  };
  for (const auto& [width, staging, given] : {Case{100'000, 1 << 16, 1}, Case{2'000'000, 4 << 20, 4 << 20}})
    for (const bool late : {false, true}) {
      const auto device = null_device(null::discrete_gpu());
      device->holds = late;
      lapilli_load_options options{};
      options.staging_size = given;
      const auto program = load(sample_program({.width = width}), device, options);
      Recorded copies;
      for (const Recorded& commands : device->submitted)
        std::ranges::copy(only(commands, Kind::copy), std::back_inserter(copies));
      const uint64_t bytes = uint64_t{4} * width, piece = staging / 4;
      CHECK(copies.size() == (bytes + piece - 1) / piece && device->submitted.size() > 2);
      for (const auto& copy : copies)
        CHECK(copy.from.buffer == copies.front().from.buffer && copy.from.offset + copy.from.size <= staging);
      // What stays, the staging memory, and the constant that a kernel reads where it is staged.
      CHECK(device->most_taken <= program->memory().constants + staging + bytes + 1024);
      const Floats x = numbers(width);
      CHECK(is_the_sample(x, run(*program, 0, {tensor(x, {1, width})}), width));
    }
}

// The device may still be at what was uploaded when a load fails: all of it stays until that is done.
TEST(a_load_that_fails_waits) {
  hal::Capabilities gpu = null::discrete_gpu();
  gpu.all_memory =
      uint64_t{22} << 20; // enough for constants and staging memory, and not for the constant that is packed
  const auto device = null_device(gpu);
  device->holds = true;
  lapilli_load_options options{};
  options.staging_size = 4 << 20;
  const FileBytes file = sample_program({.width = 2'000'000});
  CHECK(has(thrown([&] { load(file, device, options); }), "for a constant to be packed"));
  CHECK(device->taken == 0 && device->held.empty() && !device->submitted.empty());
}

TEST(the_bar_takes_inputs_without_a_copy) {
  hal::Capabilities gpu = null::discrete_gpu();
  gpu.large_bar = true;
  const auto device = null_device(gpu);
  const auto program = load(sample_program(), device);
  const Floats x = numbers(7);
  CHECK(is_the_sample(x, run(*program, 0, {tensor(x, {1, 7})}), 7));
  CHECK(summary(device->submitted.back()) == "b d0 b d1 b d0 b");
  CHECK(has(program->info(), "\"input_path\":\"bar\""));
}

TEST(states_come_in_order) {
  const auto device = null_device();
  const auto program = load(state_program(), device);
  const Floats ones(4, 1.0f);
  CHECK(run(*program, 0, {tensor(ones, {4})}) == Floats({2, 3, 4, 5}));
  const Recorded& last = device->submitted.back();
  CHECK(summary(last) == "b b d0 b d1 b"); // after what earlier runs left, and after the input
  CHECK(last[0].before == (hal::compute | Stage::transfer_write) && last[0].after == hal::compute);
  CHECK(run(*program, 0, {tensor(ones, {4})}) == Floats({3, 4, 5, 6}));
  CHECK(run(*program, 1, {}) == Floats({3, 4, 5, 6}));
  program->reset();
  CHECK(summary(device->submitted.back()) == "b c f b"); // the first has a value to begin with, the second is zero
  CHECK(run(*program, 1, {}) == Floats({1, 2, 3, 4}));
  CHECK(run(*program, 2, {}, {3}) == Floats({1, 2, 3}));
}

TEST(commands_are_timed_one_by_one) {
  const auto device = null_device();
  const auto program = load(sample_program(), device);
  const Floats x = numbers(7);
  const std::vector<lapilli_tensor> inputs{tensor(x, {1, 7})};
  std::vector<uint64_t> times(3);
  uint64_t total = 0;
  program->profile(0, {inputs}, 2, times, total);
  CHECK(times == std::vector<uint64_t>(3, 10) && total == 10);
  CHECK(summary(*(device->submitted.end() - 3)) == "b b t d0 t b t d1 t b t d0 t b");
  CHECK(summary(device->submitted.back()) == "t b d0 b d1 b d0 b t");
}

TEST(buffers_between_commands_are_read) {
  const auto device = null_device();
  const auto program = load(sample_program(), device);
  const Floats x = numbers(7);
  const std::vector<lapilli_tensor> inputs{tensor(x, {1, 7})};
  Floats between(7);
  program->read_buffer(0, {inputs}, 1, 5, std::as_writable_bytes(std::span(between))); // t2, after the second command
  CHECK(summary(device->submitted.back()) == "b d0 b d1 b c b");
  for (size_t i = 0; i < 7; ++i)
    CHECK(between[i] == 2 * (x[i] + 3 * static_cast<float>(i)));
}

TEST(what_a_device_lacks_is_said) {
  const auto refusal = [](auto change, const FileBytes& file = sample_program()) {
    hal::Capabilities gpu = null::integrated_gpu();
    change(gpu);
    return thrown([&] { load(file, null_device(gpu)); });
  };
  using C = hal::Capabilities;
  CHECK(refusal([](C&) {}).empty());
  CHECK(has(refusal([](C& c) { c.spirv_minor = 0; }), "its kernels are SPIR-V 1.3, and the device takes 1.0 at most"));
  CHECK(has(refusal([](C& c) { c.limits.max_workgroup_invocations = 32; }),
            "it needs 64 invocations in a work group, and the device allows 32"));
  CHECK(has(refusal([](C& c) { c.limits.storage_buffers = 2; }),
            "it needs 3 storage buffers in a kernel, and the device allows 2"));
  CHECK(has(refusal([](C& c) { c.limits.push_constants = 4; }), "it needs 8 bytes of push constants"));
  CHECK(has(refusal([](C& c) { c.limits.texel_buffers = 0; }, sample_program({.texel = true})),
            "it needs 1 texel buffers in a kernel, and the device allows 0"));
  CHECK(has(refusal([](C& c) { c.limits.storage_range = 16; }), "it needs 28 bytes of a storage buffer at once"));
  // With nothing lacking but room there is no advice to compile for this device.
  const FileBytes parts = sample_program({.fast_first = true, .fast_range = 4096});
  const std::string large = refusal([](C& c) { c.limits.storage_range = 16; }, parts);
  CHECK(has(large, "a value takes 4.0 KiB; even in parts a kernel needs 28 bytes of a buffer at once, and the device "
                   "allows 16 bytes. Compile the model for smaller inputs"));
  CHECK(!has(large, "for this one"));
  const auto little = [](C& c) { c.limits.storage_range = 16, c.device_memory = 2048; };
  CHECK(has(refusal(little, parts), "a value takes 4.0 KiB, and the device has 2.0 KiB of memory. Compile"));
  const std::string other = refusal([](C& c) { c.limits.storage_range = 16, c.spirv_minor = 0; }, parts);
  CHECK(has(other, "Plans \"fast\" and \"portable\": its kernels are SPIR-V 1.3") && has(other, "for this one"));
  CHECK(other.find("SPIR-V", other.find("SPIR-V") + 6) == std::string::npos);
  CHECK(has(refusal([](C&) {}, sample_program({.impossible_only = true})),
            "it needs 1073741824 invocations in a work group"));
  CHECK(has(refusal([](C& c) { c.subgroup_operations = 1; }, sample_program({.subgroup_operations = 1u | 1u << 7})),
            "the device lacks subgroup operations: quad."));
  const auto program = load(sample_program({.impossible_first = true}), null_device());
  CHECK(has(program->info(), "\"plan\":\"portable\"") && has(program->info(), "the device lacks feature 40"));
}

TEST(what_a_run_cannot_have_is_said) {
  hal::Capabilities gpu = null::integrated_gpu();
  gpu.limits.max_workgroup_count = {2, 1, 1};
  gpu.limits.storage_range = 600;
  const auto program = load(sample_program({.max_batch = 1000}), null_device(gpu));
  const auto refusal = [&](size_t batch) {
    const Floats x = numbers(7 * batch);
    return thrown([&] { run(*program, 0, {tensor(x, {static_cast<int64_t>(batch), 7})}); });
  };
  CHECK(refusal(18).empty());
  CHECK(has(refusal(19), "needs 3 work groups along axis 0 for these inputs, and Null allows 2"));
  gpu.limits.max_workgroup_count = {65535, 1, 1};
  const auto other = load(sample_program({.max_batch = 1000}), null_device(gpu));
  const Floats x = numbers(7 * 22);
  CHECK(has(thrown([&] { run(*other, 0, {tensor(x, {22, 7})}); }), "cannot use 616 bytes of a buffer at once"));
}

TEST(memory_has_an_end) {
  hal::Capabilities gpu = null::integrated_gpu();
  gpu.device_memory = gpu.all_memory = uint64_t{3} << 20;
  const auto device = null_device(gpu);
  {
    lapilli_load_options options{};
    options.staging_size = 1 << 16;
    const auto program = load(sample_program({.width = 1000, .max_batch = 10000}), device, options);
    const Floats small = numbers(1000), large = numbers(1'000'000);
    CHECK(is_the_sample(small, run(*program, 0, {tensor(small, {1, 1000})}), 1000));
    CHECK(has(thrown([&] { run(*program, 0, {tensor(large, {1000, 1000})}); }), "needs 7.6 MiB for temporary tensors"));
    CHECK(is_the_sample(small, run(*program, 0, {tensor(small, {1, 1000})}), 1000));
    CHECK(program->memory().device_total == device->taken);
  }
  CHECK(device->taken == 0);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
