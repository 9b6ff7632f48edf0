// lapilli.hpp: what it does, and that no misuse that its types allow is more than a status and a sentence.

#include "lapilli.hpp"

#include "check.h"
#include "samples.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <thread>
#include <unistd.h>

namespace {

using lapilli::DType;
using lapilli::Program;
using lapilli::Run;
using lapilli::Span;
using lapilli::Status;
using lapilli::Stream;
using lapilli::Tensor;
using Floats = std::vector<float>;

#if defined(LAPILLI_TEST_NULL)
constexpr bool on_null = true; // kernels do only what the samples' arithmetic needs
#else
constexpr bool on_null = false;
#endif

bool with_validation = false;

lapilli::Options options() {
  lapilli::Options result;
  result.validation = with_validation;
  return result;
}
Program load(const FileBytes& file) { return Program::load(Span<const std::byte>(file), options()); }

Tensor tensor(const Floats& values, std::initializer_list<int64_t> shape) {
  return lapilli::tensor<float>(Span<const float>(values), shape);
}
Floats expected(const Floats& x) {
  Floats y;
  for (size_t i = 0; i < x.size(); ++i)
    y.push_back(sample_result(x[i], static_cast<uint32_t>(i % 7)));
  return y;
}
Floats counted(size_t count) {
  Floats x(count);
  for (size_t i = 0; i < count; ++i)
    x[i] = static_cast<float>(i) / 4;
  return x;
}

// A Result that is a failure of this status with a whole sentence.
template <class T> bool fails(const lapilli::Result<T>& result, Status status, const char* part = "") {
  const bool ok = !result && result.status() == status && result.error().message.size() > 20 &&
                  result.error().message.back() == '.' && result.error().message.find(part) != std::string::npos;
  if (!ok)
    std::fprintf(stderr, "status %d instead of %d: %s\n", static_cast<int>(result.status()), static_cast<int>(status),
                 result.error().message.c_str());
  return ok;
}
constexpr Status invalid = Status::invalid_argument;

} // namespace

TEST(the_tutorial_line_by_line) {
  CHECK(lapilli::is_vulkan_available());
  const auto x = lapilli::rand({2, 7});
  const Stream stream = Stream::open(options());
  const auto on_device = x.vulkan(stream);
  const auto program = load(sample_program());
  const auto output = program.forward({on_device});
  const auto y = output.cpu();
  CHECK(on_device.is_vulkan() && output.is_vulkan() && !y.is_vulkan() && !x.is_vulkan());
  CHECK(y.values<float>() == expected(x.values<float>()));
  CHECK(program.forward({x}).values<float>() == y.values<float>()); // from the host
  CHECK(y.dim() == 2 && y.size(0) == 2 && y.size(1) == 7 && y.size(2) == 0 && y.numel() == 14 && y.nbytes() == 56);
}

TEST(tensors_pass_between_programs_on_the_device) {
  const Program sample = load(sample_program()), sum = load(sum_program());
  const Stream stream = sample.stream();
  for (const size_t rows : {0u, 1u, 3u, 16u}) {
    const Floats x = counted(7 * rows);
    const auto n = static_cast<int64_t>(rows);
    const auto on_device = tensor(x, {n, 7}).vulkan(stream);
    const uint64_t before = stream.memory().allocated;
    auto y = sample.forward({on_device});
    if (rows == 0) {
      CHECK(y.numel() == 0 && y.size(0) == 0 && y.values<float>().empty());
      continue;
    }
    y = sum.forward({y.reshape({7 * n}), y.reshape({7 * n})});
    y = sum.forward({y, tensor(Floats(x.size(), 1), {7 * n})}); // one from the host
    Floats wanted = expected(x);
    for (float& value : wanted)
      value = 2 * value + 1;
    CHECK(y.values<float>() == wanted);
    y = Tensor();
    CHECK(stream.memory().allocated == before); // nothing is kept
  }
}

TEST(results_in_tensors_that_exist) {
  const Program sample = load(sample_program());
  const Floats x = counted(14);
  Floats memory(14, -1);
  const Tensor in = tensor(x, {2, 7}), out = lapilli::from_blob(memory.data(), {2, 7});
  for (int i = 0; i < 3; ++i) {
    std::fill(memory.begin(), memory.end(), -1.0f);
    sample.run_into(0, std::vector{in}, std::vector{out});
    CHECK(memory == expected(x));
  }
  const Stream stream = sample.stream();
  const Tensor there = in.vulkan(stream), result = Tensor::empty_vulkan(stream, out.shape());
  const uint64_t before = stream.memory().allocated;
  for (int i = 0; i < 3; ++i) {
    sample.run_into(0, std::vector{there}, std::vector{result});
    CHECK(result.values<float>() == expected(x) && stream.memory().allocated == before);
  }
  CHECK(fails(sample.try_run_into(0, std::vector{in}, std::vector<Tensor>{}), invalid, "1 outputs"));
  CHECK(fails(sample.try_run_into(0, std::vector{in}, std::vector{tensor(x, {14})}), invalid, "Output 0"));
  CHECK(fails(sample.try_run_into(0, std::vector{in}, std::vector{lapilli::zeros({2, 7}, DType::int32)}), invalid));
  CHECK(fails(sample.try_run_into(0, std::vector{there}, std::vector{out}), invalid, "outputs are on the host"));
  CHECK(
      fails(sample.try_run_into(0, std::vector{in}, std::vector{tensor(x, {14}).vulkan(stream)}), invalid, "Output 0"));
  const float constant[14] = {};
  CHECK(fails(sample.try_run_into(0, std::vector{in}, std::vector{lapilli::from_blob(constant, {2, 7})}), invalid,
              "constant"));
  sample.run_into(0, std::vector{in}, std::vector{result}); // input from the host
  CHECK(result.values<float>() == expected(x));
}

TEST(runs_in_flight) {
  const Program sample = load(sample_program());
  std::vector<Run> runs;
  for (int i = 1; i < 5; ++i)
    runs.push_back(sample.submit("forward", {tensor(counted(7 * static_cast<size_t>(i)), {i, 7})}));
  for (int i = 1; i < 5; ++i) {
    const Tensor y = runs[static_cast<size_t>(i - 1)].output();
    CHECK(y.values<float>() == expected(counted(7 * static_cast<size_t>(i))));
    CHECK(fails(y.try_span<float>(), invalid, "constant")); // the run's
  }
  CHECK(fails(runs.front().try_output(1), invalid, "output 1"));
  Tensor kept = runs.back().output();
  runs.clear(); // the tensor keeps its run
  CHECK(kept.values<float>() == expected(counted(28)));
}

TEST(states) {
  if (on_null)
    return; // its kernels add no states
  const Program program = load(state_program());
  CHECK(program.states().size() == 2 && program.states().front().name == "total");
  const Tensor one = tensor({1, 0, 0, 0}, {4});
  const Stream stream = program.stream();
  CHECK(program.run("add", {one}).front().values<float>() == Floats({2, 2, 3, 4}));
  CHECK(program.run("add", {one.vulkan(stream)}).front().values<float>() == Floats({3, 2, 3, 4}));
  CHECK(program.state("total").values<float>() == Floats({3, 2, 3, 4}));
  program.set_state("total", tensor({0, 0, 0, 9}, {4}).vulkan(stream));
  CHECK(program.run("total", {}).front().values<float>() == Floats({0, 0, 0, 9}));
  program.reset();
  CHECK(program.state("total").values<float>() == Floats({1, 2, 3, 4}));
  CHECK(fails(program.try_state("none"), invalid, "total"));
  CHECK(fails(program.try_set_state("total", lapilli::zeros({5})), invalid, "float32 (4,)"));
  CHECK(fails(program.try_run("none", {}), invalid, "add, total, size, nothing"));
  CHECK(fails(program.try_forward({}), invalid));
}

TEST(checks_of_integers_reach_who_reads) {
  if (on_null)
    return;
  const Program program = load(checked_program());
  const Tensor good = tensor({0, 1, 2, 3}, {4}),
               bad = tensor({1, 1, 2, 3}, {4}); // in the place of the number of a check
  CHECK(program.forward({good}).values<float>() == Floats({0, 1, 2, 3}));
  CHECK(fails(program.try_forward({bad}), Status::out_of_range, "an operator"));
  const Stream stream = program.stream();
  CHECK(program.forward({good.vulkan(stream)}).values<float>() == Floats({0, 1, 2, 3}));
  const auto y = program.forward({bad.vulkan(stream)});
  CHECK(fails(y.try_cpu(), Status::out_of_range, "32 bits"));
  program.forward({bad.vulkan(stream)});
  CHECK(fails(stream.try_synchronize(), Status::out_of_range, "32 bits"));
  CHECK(stream.try_synchronize().has_value()); // told once
  for (int i = 0; i < 600; ++i)                // more than may wait
    program.forward({good.vulkan(stream)});
  CHECK(stream.try_synchronize().has_value());
  program.forward({bad.vulkan(stream)}); // nobody looks; nothing is left behind
}

TEST(results_and_exceptions_say_the_same) {
  const auto missing = Program::try_load("/nonexistent.lap");
  CHECK(fails(missing, Status::io_error, "/nonexistent.lap"));
  try {
    Program::load("/nonexistent.lap");
    CHECK(false);
  } catch (const lapilli::Error& error) {
    CHECK(error.status == Status::io_error && error.what() == missing.error().message);
  }
  try {
    (void)missing->handle();
    CHECK(false);
  } catch (const lapilli::Error& error) {
    CHECK(error.status == Status::io_error);
  }
  CHECK(!missing.value_or(Program()));
  FileBytes damaged = sample_program();
  damaged[damaged.size() - 1] ^= std::byte{1};
  CHECK(fails(Program::try_load(Span<const std::byte>(damaged), options()), Status::invalid_file));
  lapilli::Options other = options();
  other.device = "no such device";
  CHECK(fails(Program::try_load(Span<const std::byte>(sample_program()), other), Status::no_device, "no such device"));
  CHECK(fails(Stream::try_open(other), Status::no_device, "no such device"));
  CHECK(fails(lapilli::try_default_stream("no such device"), Status::no_device, "no such device"));
  other = options();
  other.plan = "no such plan";
  CHECK(fails(Program::try_load(Span<const std::byte>(sample_program()), other), invalid, "no such plan"));
}

// Every function of every kind of object, on objects that were moved from, that never were, and that were assigned from such.
TEST(empty_objects_say_so) {
  const auto try_all = [](const Program& program, const Tensor& tensor, const Run& run, const Stream& stream) {
    CHECK(!program && !tensor && !run && !stream);
    CHECK(fails(program.try_forward({tensor}), invalid, "empty") && fails(program.try_run(0, {}), invalid, "empty"));
    CHECK(fails(program.try_submit("forward", {}), invalid, "empty"));
    CHECK(fails(program.try_run_into(0, {}, {}), invalid, "empty") && fails(program.try_methods(), invalid, "empty"));
    CHECK(fails(program.try_inputs(), invalid) && fails(program.try_outputs("a"), invalid));
    CHECK(fails(program.try_symbols(), invalid) && fails(program.try_states(), invalid));
    CHECK(fails(program.try_state("a"), invalid) && fails(program.try_set_state("a", tensor), invalid));
    CHECK(fails(program.try_reset(), invalid) && fails(program.try_device(), invalid));
    CHECK(fails(program.try_stream(), invalid) && fails(program.try_memory(), invalid));
    CHECK(fails(program.try_load_times(), invalid) && fails(program.try_describe(), invalid));
    CHECK(fails(program.try_info(), invalid) && program.handle() == nullptr);
    CHECK(tensor.dim() == 0 && tensor.numel() == 0 && tensor.nbytes() == 0 && tensor.shape().empty());
    CHECK(fails(tensor.try_span<float>(), invalid) && fails(tensor.try_values<float>(), invalid));
    CHECK(fails(tensor.try_item<float>(), invalid) && fails(tensor.try_vulkan(stream), invalid));
    CHECK(fails(tensor.try_cpu(), invalid) && fails(tensor.try_copy_from(tensor), invalid));
    CHECK(fails(tensor.try_reshape({}), invalid) && !tensor.stream() && tensor.buffer() == nullptr);
    CHECK(fails(Tensor::try_empty_vulkan(stream, {}), invalid) &&
          fails(lapilli::zeros({2}).try_vulkan(stream), invalid));
    CHECK(fails(run.try_wait(), invalid) && fails(run.try_output(), invalid) && fails(run.try_outputs(), invalid));
    CHECK(fails(stream.try_flush(), invalid) && fails(stream.try_synchronize(), invalid));
    CHECK(fails(stream.try_empty_cache(), invalid) && fails(stream.try_set_memory_limit(1), invalid));
    CHECK(fails(stream.try_memory(), invalid) && fails(stream.try_device(), invalid) && stream.handle() == nullptr);
  };
  try_all({}, {}, {}, {});
  Program program = load(sample_program());
  Stream stream = program.stream();
  Tensor x = lapilli::zeros({1, 7}), there = x.vulkan(stream);
  Run run = program.submit(0, {x});
  const Program taken = std::move(program);
  const Stream taken_stream = std::move(stream);
  const Tensor taken_x = std::move(x), taken_there = std::move(there);
  const Run taken_run = std::move(run);
  try_all(program, x, run, stream);
  try_all(program, there, run, stream);
  CHECK(fails(taken.try_forward({x}), invalid, "Input 0") &&
        fails(taken.try_run_into(0, std::vector{taken_x}, std::vector{x}), invalid, "Output 0"));
  CHECK(fails(taken.try_forward({taken_there, there}), invalid, "Input 1"));
  Tensor again = taken_x;
  again = std::move(again); // itself
  Tensor& same = again;
  again = same;
  CHECK(again && taken.forward({again}).numel() == 7);
  taken_run.wait();
}

TEST(shapes_dtypes_and_counts_that_do_not_fit) {
  const Program sample = load(sample_program());
  const Stream stream = sample.stream();
  for (const bool there : {false, true}) {
    const auto put = [&](const Tensor& t) { return there ? t.vulkan(stream) : t; };
    CHECK(fails(sample.try_forward({}), invalid, "takes 1 inputs"));
    const Tensor good = put(lapilli::zeros({1, 7}));
    CHECK(fails(sample.try_forward({good, good}), invalid, "2 were given"));
    CHECK(fails(sample.try_forward({put(lapilli::zeros({7}))}), invalid, "1 dimensions"));
    CHECK(fails(sample.try_forward({put(lapilli::zeros({1, 8}))}), invalid, "(1, 8)"));
    CHECK(fails(sample.try_forward({put(lapilli::zeros({17, 7}))}), invalid, "17"));
    CHECK(fails(sample.try_forward({put(lapilli::zeros({1, 7, 1}))}), invalid));
    for (const DType dtype : {DType::boolean, DType::uint8, DType::int8, DType::int16, DType::int32, DType::int64,
                              DType::float16, DType::bfloat16, DType::float64})
      CHECK(fails(sample.try_forward({put(lapilli::zeros({1, 7}, dtype))}), invalid, "must be float32"));
    const std::vector<int64_t> sizes{3};
    CHECK(fails(sample.try_run(0, std::vector{good}, sizes), invalid, "sizes"));
    CHECK(fails(sample.try_run(1, {good}), invalid, "no method 1") && fails(sample.try_run(-1, {good}), invalid));
    CHECK(fails(sample.try_run("backward", {good}), invalid, "forward") && fails(sample.try_run("", {good}), invalid));
    CHECK(fails(sample.try_run(static_cast<const char*>(nullptr), {good}), invalid));
  }
  CHECK(fails(sample.try_submit(0, {lapilli::zeros({1, 7}).vulkan(stream)}), invalid, "takes tensors of the host"));
  const Stream other = sample.stream();
  const Program sum = load(sum_program());
  const Tensor a = lapilli::zeros({3}).vulkan(stream), b = lapilli::zeros({3}).vulkan(other);
  CHECK(fails(sum.try_forward({a, b}), invalid, "stream"));
  CHECK(fails(sum.try_forward({a, lapilli::zeros({4})}), invalid, "(4,)"));
  CHECK(sum.forward({a, b.vulkan(stream)}).values<float>() == Floats(3));
  CHECK(sum.forward({a, a.vulkan()}).values<float>() == Floats(3)); // it is on a device already
}

TEST(tensors_that_cannot_be) {
  const std::vector<int64_t> negative{2, -1}, huge{INT64_MAX, INT64_MAX}, none{0, INT64_MAX, INT64_MAX}, many(17, 1),
      six{2, 3};
  CHECK(fails(Tensor::try_empty(negative), invalid, "(2, -1)") && fails(Tensor::try_empty(huge), invalid, "larger"));
  CHECK(Tensor::empty(none).numel() == 0 && fails(Tensor::try_empty(many), invalid, "16 dimensions"));
  CHECK(fails(Tensor::try_empty(six, static_cast<DType>(77)), invalid, "77"));
  const std::vector<int64_t> large{int64_t{1} << 50};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // which end the process instead
  CHECK(fails(Tensor::try_empty(large), Status::out_of_memory));
#endif
  Floats values(6, 1);
  CHECK(fails(Tensor::try_from_blob(values.data(), 23, six, DType::float32), invalid, "24 bytes; 23"));
  CHECK(fails(Tensor::try_from_blob(static_cast<void*>(nullptr), 24, six, DType::float32), invalid, "null"));
  const std::vector<int64_t> seven{7};
  CHECK(fails(Tensor::try_of(Span<const float>(values), seven), invalid, "7 elements; 6"));
  const Tensor x = tensor(values, {2, 3});
  CHECK(fails(x.try_span<double>(), invalid, "float32") && fails(x.try_span<int32_t>(), invalid));
  CHECK(fails(x.try_item<float>(), invalid, "6 elements") && fails(x.try_reshape(seven), invalid, "(7,)"));
  CHECK(fails(x.try_copy_from(tensor(values, {6})), invalid, "(6,)"));
  const Program program = load(sample_program());
  const Stream stream = program.stream();
  const Tensor there = x.vulkan(stream);
  CHECK(fails(there.try_span<float>(), invalid, "cpu()") && fails(there.try_values<double>(), invalid));
  CHECK(fails(there.try_copy_from(tensor(values, {6})), invalid));
  CHECK(fails(Tensor::try_empty_vulkan(stream, large), Status::out_of_memory));
  const auto beyond = lapilli::tensor<int64_t>({1, int64_t{1} << 31});
  CHECK(fails(beyond.try_vulkan(stream), invalid, "Element 1 is 2147483648"));
}

TEST(memory_limits) {
  const Stream stream = load(sample_program()).stream(); // the program is gone
  stream.set_memory_limit(1);
  CHECK(fails(lapilli::zeros({1 << 20}).try_vulkan(stream), Status::out_of_memory, "limit"));
  stream.set_memory_limit(0);
  CHECK(lapilli::zeros({1 << 20}).vulkan(stream).cpu().numel() == 1 << 20);
  stream.empty_cache();
}

TEST(copies_in_every_direction) {
  const Stream a = Stream::open(options()), b = Stream::open(options());
  const Floats values{1, 2, 3, 4, 5};
  const Tensor host = tensor(values, {5});
  for (const Tensor& from : {host, host.vulkan(a), host.vulkan(b)})
    for (const Tensor& to : {lapilli::zeros({5}), lapilli::zeros({5}).vulkan(a), lapilli::zeros({5}).vulkan(b)}) {
      to.copy_from(from);
      to.copy_from(to); // itself
      CHECK(to.values<float>() == values);
    }
  const Tensor scalar = lapilli::full<float>({}, 3.5f);
  CHECK(scalar.dim() == 0 && scalar.item<float>() == 3.5f && scalar.vulkan(a).item<float>() == 3.5f);
  const Tensor odd = lapilli::full<int8_t>({3}, -7);
  CHECK(odd.vulkan(a).values<int8_t>() == std::vector<int8_t>(3, -7));
}

// What is destroyed while others still use what came from it, in every order.
TEST(the_ends_of_objects_come_in_any_order) {
  for (int order = 0; order < 24; ++order) {
    Program program = load(sample_program());
    Stream stream = program.stream();
    const Tensor x = tensor(counted(7), {1, 7});
    Tensor there = x.vulkan(stream), y = program.forward({there});
    Run run = program.submit(0, {x});
    Tensor of_run = run.output();
    std::array<int, 4> which{0, 1, 2, 3};
    for (int i = 0; i < order; ++i)
      std::next_permutation(which.begin(), which.end());
    for (const int one : which) {
      if (one == 0)
        program = Program();
      if (one == 1)
        stream = Stream();
      if (one == 2)
        run = Run();
      if (one == 3)
        there = Tensor();
      CHECK(of_run.values<float>() == expected(counted(7)));
    }
    CHECK(y.values<float>() == expected(counted(7)));
  }
}

TEST(two_threads_and_more) {
  if (on_null)
    return; // it is for one
  const Program sample = load(sample_program()), sum = load(sum_program());
  const Stream stream = sample.stream();
  const Run shared = sample.submit(0, {tensor(counted(7), {1, 7})});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 4; ++id)
    threads.emplace_back([&, id] {
      const Stream own = id % 2 == 0 ? stream : sample.stream();
      const Program copy = sample;
      for (int i = 0; i < 30; ++i) {
        const Floats x = counted(7 * static_cast<size_t>(id));
        const Tensor in = tensor(x, {id, 7});
        wrong += copy.forward({in}).values<float>() != expected(x);
        const Tensor y = copy.forward({in.vulkan(own)});
        const Tensor flat = y.reshape({7 * id});
        wrong += sum.forward({flat, flat}).values<float>().front() != 2 * expected(x).front();
        wrong += shared.output().values<float>() != expected(counted(7));
        wrong +=
            fails(copy.try_forward({lapilli::zeros({1, 8})}), invalid, "(1, 8)") ? 0 : 1; // messages are a thread's own
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  CHECK(wrong == 0);
}

// Memory of the caller is read and written where it is.
TEST(memory_of_the_host_is_used_as_it_lies) {
  const Program sample = load(sample_program());
  const Stream stream = sample.stream();
  const uint64_t alignment = on_null ? 64 : stream.device().host_alignment();
  const std::vector<int64_t> shape{2, 7}, large{1 << 20};
  lapilli_shared_memory memory{};
  memory.kind = LAPILLI_MEMORY_HOST;
  CHECK(!Tensor::try_import_memory(stream, memory, 4096, shape)); // no address
  if (alignment == 0)
    return; // the driver imports none
  using Memory = std::unique_ptr<std::byte, void (*)(void*)>;
  const Memory in(static_cast<std::byte*>(std::aligned_alloc(alignment, 2 * alignment)), std::free);
  const Memory out(static_cast<std::byte*>(std::aligned_alloc(alignment, alignment)), std::free);
  const Floats x = counted(14);
  std::memcpy(in.get(), x.data(), 56);
  std::memset(out.get(), 0, alignment);
  memory.handle = reinterpret_cast<intptr_t>(in.get());
  CHECK(fails(Tensor::try_import_memory(stream, memory, alignment, large), invalid, "the memory has"));
  CHECK(fails(Tensor::try_import_memory(Stream(), memory, alignment, shape), invalid, "empty"));
  if (!on_null)
    CHECK(fails(Tensor::try_import_memory(stream, memory, alignment - 1, shape), invalid, "multiples of"));
  const uint64_t before = stream.memory().allocated;
  {
    const Tensor from = Tensor::import_memory(stream, memory, 2 * alignment, shape);
    memory.handle = reinterpret_cast<intptr_t>(out.get());
    const Tensor to = Tensor::import_memory(stream, memory, alignment, shape);
    sample.run_into(0, std::vector{from}, std::vector{to});
    stream.synchronize();
    CHECK(std::memcmp(out.get(), expected(x).data(), 56) == 0); // no copy was asked for
    std::memset(in.get(), 0, 56);                               // the host writes, and the device sees it
    sample.run_into(0, std::vector{from}, std::vector{to});
    stream.synchronize();
    CHECK(std::memcmp(out.get(), expected(Floats(14)).data(), 56) == 0);
    sample.run_into(0, std::vector{from}, std::vector{to}); // in flight when they are destroyed
  }
  CHECK(stream.memory().allocated == before);
  memory.kind = 77;
  CHECK(fails(Tensor::try_import_memory(stream, memory, alignment, shape), invalid, "77"));
}

TEST(memory_that_others_are_told_of) {
  const Program sample = load(sample_program());
  const Stream stream = sample.stream(), other = Stream::open(options());
  const std::vector<int64_t> shape{2, 7};
  const Floats x = counted(14);
  const Tensor in = tensor(x, {2, 7});
  CHECK(fails(in.try_export_memory(LAPILLI_MEMORY_OPAQUE_FD), invalid, "on the host"));
  CHECK(fails(in.vulkan(stream).try_export_memory(LAPILLI_MEMORY_OPAQUE_FD), Status::unsupported));
  CHECK(!Tensor::try_empty_shared(stream, LAPILLI_MEMORY_HOST, shape));
  for (const auto kind : {LAPILLI_MEMORY_OPAQUE_FD, LAPILLI_MEMORY_DMA_BUF}) {
    const auto made = Tensor::try_empty_shared(stream, kind, shape);
    if (!made) {
      CHECK(fails(made, Status::unsupported));
      continue;
    }
    std::printf("     shares memory of kind %d\n", static_cast<int>(kind));
    sample.run_into(0, std::vector{in}, std::vector{*made});
    stream.synchronize();
    const lapilli_shared_memory memory = made->export_memory(kind);
    CHECK(memory.handle >= 0 && memory.memory_bytes >= 56 && memory.offset == 0);
    const auto there = Tensor::try_import_memory(other, memory, made->nbytes(), shape);
    CHECK(there && there->values<float>() == expected(x)); // as another process or CUDA sees it
    ::close(static_cast<int>(memory.handle));
    CHECK(fails(Tensor::try_import_memory(other, memory, made->nbytes(), shape), invalid, "not open"));
    const auto wrong = kind == LAPILLI_MEMORY_DMA_BUF ? LAPILLI_MEMORY_OPAQUE_FD : LAPILLI_MEMORY_DMA_BUF;
    CHECK(fails(made->try_export_memory(wrong), Status::unsupported));
  }
  if (on_null)
    return;
  // A VkBuffer of the same device, seen by another stream.
  const Tensor there = in.vulkan(stream);
  const lapilli_shared_memory memory = there.export_memory(LAPILLI_MEMORY_VULKAN_BUFFER);
  CHECK(memory.handle != 0 && memory.memory_bytes >= memory.offset + 56);
  stream.synchronize();
  lapilli_shared_memory named{LAPILLI_MEMORY_VULKAN_BUFFER, memory.handle, 0, 64};
  CHECK(fails(Tensor::try_import_memory(other, named, 56, shape), invalid, "beginning"));
  named.offset = 0;
  const std::vector<int64_t> all{static_cast<int64_t>(memory.offset / 4 + 14)};
  const Floats seen = Tensor::import_memory(other, named, memory.offset + 56, all).values<float>();
  CHECK(Floats(seen.end() - 14, seen.end()) == x);
}

TEST(timeouts) {
  if (on_null)
    return;
  const Program slow = load(slow_program(20000));
  const Run run = slow.submit(0, {lapilli::zeros({1})});
  const auto early = run.try_wait(0);
  CHECK(early || fails(early, Status::timeout));
  run.wait();
}

TEST(sixteen_bits_round_as_they_should) {
  using lapilli::BFloat16;
  using lapilli::Half;
  for (uint32_t bits = 0; bits < 65536; ++bits) { // every value comes back
    Half half;
    BFloat16 wide;
    half.bits = wide.bits = static_cast<uint16_t>(bits);
    const auto value = static_cast<float>(half), value_wide = static_cast<float>(wide);
    CHECK(std::isnan(value) ? std::isnan(static_cast<float>(Half(value))) : Half(value).bits == bits);
    CHECK(std::isnan(value_wide) ? std::isnan(static_cast<float>(BFloat16(value_wide)))
                                 : BFloat16(value_wide).bits == bits);
    if (bits < 0x7bff) { // between neighbours: to the even one; a little more: to the next
      Half next;
      next.bits = static_cast<uint16_t>(bits + 1);
      const float middle = (value + static_cast<float>(next)) / 2;
      CHECK(Half(middle).bits == (bits % 2 == 0 ? bits : bits + 1));
      CHECK(Half(std::nextafter(middle, 1e9f)).bits == bits + 1 && Half(std::nextafter(middle, -1.0f)).bits == bits);
    }
  }
  CHECK(Half(65519.0f).bits == 0x7bff && Half(65520.0f).bits == 0x7c00 && Half(-1e9f).bits == 0xfc00);
  CHECK(BFloat16(1.00390625f).bits == 0x3f80 && BFloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
}

TEST(devices_and_descriptions) {
  const auto all = lapilli::devices();
  CHECK(!all.empty() && all.front().index() == 0 && !all.front().name().empty() && all.front().memory() > 0);
  const Program sample = load(sample_program());
  CHECK(sample.device().name() == sample.stream().device().name() && sample.device().alignment() >= 16);
  CHECK(sample.methods() == std::vector<std::string>{"forward"});
  const auto inputs = sample.inputs();
  CHECK(inputs.size() == 1 && inputs.front().shape == lapilli::Shape({-1, 7}) && inputs.front().max.front() == 16);
  CHECK(sample.outputs().size() == 1 && sample.symbols().size() == 1 && sample.symbols().front().max == 16);
  CHECK(sample.info().find("\"plan\"") != std::string::npos && sample.describe().find("forward") != std::string::npos);
  CHECK(sample.memory().device_total > 0 && sample.load_times().total > 0);
}

TEST(writers_want_a_language_model) {
  const auto program = lapilli::Program::load(std::span<const std::byte>(sample_program()));
  CHECK(program.metadata("labels") == "[\"a\", \"b\"]" && program.metadata("other").empty() &&
        program.warning().empty());
  const auto none = lapilli::Writer::try_open(program);
  CHECK(none.status() == lapilli::Status::invalid_argument &&
        none.error().message.find("no language model") != std::string::npos);
  CHECK(!lapilli::Writer::try_open(lapilli::Program()) && !lapilli::Writer().try_next());
  // Metadata that are no better than those of a damaged file.
  for (const char* about : {"", "{\"words\": 3}", "{\"context\": 1, \"words\": 3}",
                            "{\"context\": 9, \"words\": 99999999999}", "{\"context\": 9, \"words\": 3}"}) {
    ProgramBuilder builder;
    auto entry = std::make_unique<schema::MetadataT>();
    entry->key = "llm.model";
    entry->value = about;
    builder.program.metadata.push_back(std::move(entry));
    MethodBuilder m;
    m.method.name = "forward";
    m.method.plans.push_back(std::make_unique<schema::PlanT>(PlanBuilder("portable").plan));
    builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
    const FileBytes file = builder.finish();
    const auto damaged = lapilli::Program::try_load(std::span<const std::byte>(file));
    CHECK(static_cast<bool>(damaged));
    if (damaged)
      CHECK(lapilli::Writer::try_open(*damaged).status() == lapilli::Status::invalid_file);
  }
}

int main(int argc, char** argv) {
  const auto tried = [] {
    lapilli::Options with;
    with.validation = true;
    return Stream::try_open(with).has_value();
  };
  if (const char* path = std::getenv("LAPILLI_VALIDATION_LOG"); path != nullptr && !on_null) {
    std::filesystem::remove(path);
    with_validation = tried();
  }
  const int result = run_tests(argc, argv);
  const char* path = std::getenv("LAPILLI_VALIDATION_LOG");
  if (with_validation && std::filesystem::exists(path) && std::filesystem::file_size(path) > 0)
    return std::fprintf(stderr, "the validation layers reported something\n"), EXIT_FAILURE;
  return result;
}
