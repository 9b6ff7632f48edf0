// Streams: work in order on device memory, through the C ABI.

#include "loaded.h"

#include <algorithm>
#include <numeric>
#include <thread>

namespace {

using Floats = std::vector<float>;

// A stream that is destroyed at the end of the scope.
class Stream {
public:
  Stream() {
    lapilli_load_options options{};
    options.validation = with_validation ? 1 : 0;
    CHECK(lapilli_stream_create(&options, &handle) == LAPILLI_OK);
  }
  ~Stream() { lapilli_stream_destroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  lapilli_stream_memory_info memory() const {
    lapilli_stream_memory_info info{};
    CHECK(lapilli_stream_memory(handle, &info) == LAPILLI_OK);
    return info;
  }

  lapilli_stream* handle = nullptr;
};

// A buffer of floats that is destroyed at the end of the scope.
class Buffer {
public:
  Buffer(const Stream& stream, size_t count) : count_(count) {
    CHECK(lapilli_buffer_create(stream.handle, 4 * count, &handle) == LAPILLI_OK);
  }
  Buffer(const Stream& stream, const Floats& values) : Buffer(stream, values.size()) { write(values); }
  ~Buffer() { lapilli_buffer_destroy(handle); }
  Buffer(Buffer&& other) noexcept : handle(std::exchange(other.handle, nullptr)), count_(other.count_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(handle, other.handle);
    std::swap(count_, other.count_);
    return *this;
  }

  void write(const Floats& values, size_t first = 0) {
    CHECK(lapilli_buffer_write(handle, 4 * first, values.data(), 4 * values.size()) == LAPILLI_OK);
  }
  Floats read() const {
    Floats values(count_);
    CHECK(lapilli_buffer_read(handle, 0, values.data(), 4 * count_) == LAPILLI_OK);
    return values;
  }

  lapilli_buffer* handle = nullptr;

private:
  size_t count_;
};

lapilli_status enqueue(const Stream& stream, const Program& program, std::vector<int64_t> symbols,
                       std::vector<lapilli_slice> inputs, std::vector<lapilli_slice> outputs, uint32_t method = 0) {
  return lapilli_enqueue(stream.handle, program.handle, method, symbols.data(), static_cast<uint32_t>(symbols.size()),
                         inputs.data(), static_cast<uint32_t>(inputs.size()), outputs.data(),
                         static_cast<uint32_t>(outputs.size()));
}

bool message_has(const char* text) { return std::strstr(lapilli_last_error(), text) != nullptr; }

Floats sum(const Floats& a, const Floats& b) {
  Floats result(a.size());
  std::ranges::transform(a, b, result.begin(), std::plus());
  return result;
}

constexpr uint64_t mebi = 1 << 20;

} // namespace

TEST(a_program_runs) {
  const Stream stream;
  const Program program(sum_program());
  const Floats a = random_values(1000, 1), b = random_values(1000, 2);
  const Buffer x(stream, a), y(stream, b), z(stream, 1000);
  CHECK(enqueue(stream, program, {1000}, {{x.handle, 0}, {y.handle, 0}}, {{z.handle, 0}}) == LAPILLI_OK);
  CHECK(z.read() == sum(a, b));
}

TEST(arenas_constants_and_texel_buffers) {
  for (const bool texel : {false, true}) {
    const Stream stream;
    const Program program(sample_program({.width = 100, .max_batch = 2000, .texel = texel}));
    // Sizes at which a texel view ends in the padding of its buffer, and others; at an offset too.
    for (const int64_t batch : {1, 16, 164, 655, 656, 1311, 2000, 3, 0})
      for (const uint64_t offset : {uint64_t{0}, uint64_t{65536}}) {
        const Floats x = random_values(static_cast<size_t>(batch) * 100, 3);
        const Buffer input(stream, offset / 4 + x.size()), output(stream, offset / 4 + x.size());
        CHECK(lapilli_buffer_write(input.handle, offset, x.data(), 4 * x.size()) == LAPILLI_OK);
        CHECK(enqueue(stream, program, {batch}, {{input.handle, offset}}, {{output.handle, offset}}) == LAPILLI_OK);
        const Floats y = output.read();
        bool correct = true;
        for (size_t i = 0; i < x.size(); ++i)
          correct = correct && y[offset / 4 + i] == sample_result(x[i], static_cast<uint32_t>(i % 100));
        CHECK(correct);
      }
  }
}

static void try_random_orders(unsigned seeds);
static void try_large_copies();

TEST(everything_is_in_order) { try_random_orders(4); }
TEST(large_copies) { try_large_copies(); }

// As where the host does not see the device's memory.
TEST(by_staging_memory) {
  const Environment in("LAPILLI_INPUT_PATH", "staging"), out("LAPILLI_OUTPUT_PATH", "staging");
  try_random_orders(2);
  try_large_copies();
}

// Runs, copies, fills, writes and reads in a random order on slices of a few buffers, against the same on the host.
void try_random_orders(unsigned seeds) {
  constexpr size_t count = 6, size = 256, slices = 4, whole = size * slices;
  const Program program(sum_program());
  for (unsigned seed = 0; seed < seeds; ++seed) {
    const Stream stream;
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    std::vector<Floats> host(count, Floats(whole));
    std::vector<Buffer> device;
    for (Floats& values : host) {
      values = random_values(whole, static_cast<unsigned>(random()));
      device.emplace_back(stream, values);
    }
    bool same = true;
    for (int step = 0; step < 1500; ++step) {
      struct Slice {
        size_t buffer, first;
      };
      const auto slice = [&] { return Slice{below(count), below(slices) * size}; };
      const auto begin = [&](const Slice& s) { return host[s.buffer].begin() + static_cast<ptrdiff_t>(s.first); };
      const auto on_device = [&](const Slice& s) { return lapilli_slice{device[s.buffer].handle, 4 * s.first}; };
      const Slice a = slice(), b = slice(), c = slice();
      switch (below(12)) {
      case 0: {
        const Floats values = random_values(size, static_cast<unsigned>(random()));
        std::ranges::copy(values, begin(c));
        device[c.buffer].write(values, c.first);
        break;
      }
      case 1:
        std::fill_n(begin(c), size, 1.0f);
        CHECK(lapilli_buffer_fill(device[c.buffer].handle, 4 * c.first, 4 * size, 0x3f800000) == LAPILLI_OK);
        break;
      case 2:
        if (a.buffer == c.buffer && a.first == c.first)
          break;
        std::copy_n(begin(a), size, begin(c));
        CHECK(lapilli_buffer_copy(device[a.buffer].handle, 4 * a.first, device[c.buffer].handle, 4 * c.first,
                                  4 * size) == LAPILLI_OK);
        break;
      case 3:
        if (below(20) == 0)
          same = same && device[c.buffer].read() == host[c.buffer];
        else if (below(2) == 0)
          CHECK(lapilli_flush(stream.handle) == LAPILLI_OK);
        break;
      case 4: { // one that goes at once, and comes back as another
        const Buffer passing(stream, size);
        CHECK(enqueue(stream, program, {size}, {on_device(a), on_device(b)}, {{passing.handle, 0}}) == LAPILLI_OK);
        CHECK(enqueue(stream, program, {size}, {{passing.handle, 0}, on_device(a)}, {on_device(c)}) == LAPILLI_OK);
        std::transform(begin(a), begin(a) + size, begin(b), begin(c), [](float x, float y) { return x + y + x; });
        break;
      }
      default: // in place now and then, since slices are drawn at random
        CHECK(enqueue(stream, program, {size}, {on_device(a), on_device(b)}, {on_device(c)}) == LAPILLI_OK);
        std::transform(begin(a), begin(a) + size, begin(b), begin(c), std::plus());
      }
    }
    for (size_t i = 0; i < count; ++i)
      same = same && device[i].read() == host[i];
    CHECK(same);
  }
}

TEST(a_long_chain) {
  const Stream stream;
  const Program program(sum_program());
  const Buffer one(stream, Floats(64, 1.0f)), total(stream, Floats(64, 0.0f));
  for (int i = 0; i < 10000; ++i) // more than there are commands in flight
    CHECK(enqueue(stream, program, {64}, {{total.handle, 0}, {one.handle, 0}}, {{total.handle, 0}}) == LAPILLI_OK);
  CHECK(total.read() == Floats(64, 10000.0f));
}

TEST(what_is_destroyed_is_used_to_the_end) {
  const Stream stream;
  const Buffer result(stream, Floats(4096));
  for (int i = 0; i < 50; ++i) {
    Program program(sum_program());
    const Buffer a(stream, Floats(4096, static_cast<float>(i)));
    CHECK(enqueue(stream, program, {4096}, {{a.handle, 0}, {result.handle, 0}}, {{result.handle, 0}}) == LAPILLI_OK);
  }
  CHECK(result.read() == Floats(4096, 49.0f * 50.0f / 2));
  CHECK(stream.memory().reserved <= 8 * mebi);
}

TEST(buffers_outlive_their_stream) {
  auto stream = std::make_unique<Stream>();
  const Program program(sum_program());
  const Buffer a(*stream, Floats(64, 2.0f));
  CHECK(enqueue(*stream, program, {64}, {{a.handle, 0}, {a.handle, 0}}, {{a.handle, 0}}) == LAPILLI_OK);
  stream.reset();
  CHECK(a.read() == Floats(64, 4.0f));
}

TEST(states_change_in_the_order_of_the_stream) {
  const Stream stream;
  const Program program(state_program());
  const Floats x{1, 1, 1, 1};
  const Buffer input(stream, x), output(stream, 4), between(stream, 4);
  for (int i = 0; i < 5; ++i)
    CHECK(enqueue(stream, program, {}, {{input.handle, 0}}, {{output.handle, 0}}) == LAPILLI_OK);
  CHECK(enqueue(stream, program, {}, {}, {{between.handle, 0}}, 1) == LAPILLI_OK);
  CHECK(enqueue(stream, program, {}, {{input.handle, 0}}, {{output.handle, 0}}) == LAPILLI_OK);
  // What the program does by itself comes after what was queued.
  Floats state(4);
  CHECK(lapilli_state_read(program.handle, 0, state.data(), 16) == LAPILLI_OK);
  CHECK(state == Floats({7, 8, 9, 10}));
  CHECK(between.read() == Floats({6, 7, 8, 9}));
  CHECK(output.read() == Floats({7, 8, 9, 10}));
  CHECK(lapilli_reset(program.handle) == LAPILLI_OK);
  CHECK(enqueue(stream, program, {}, {{input.handle, 0}}, {{output.handle, 0}}) == LAPILLI_OK);
  CHECK(output.read() == Floats({2, 3, 4, 5}));
}

// Whatever stream a run was queued on, the runs of a program with states take place in the order of the calls.
TEST(states_on_several_streams) {
  const Program program(state_program());
  const std::array<Stream, 3> streams;
  const Floats x{1, 1, 1, 1};
  std::vector<Buffer> inputs, outputs;
  for (const Stream& stream : streams) {
    inputs.emplace_back(stream, x);
    outputs.emplace_back(stream, 4);
  }
  const auto run = [&](size_t i) {
    CHECK(enqueue(streams[i], program, {}, {{inputs[i].handle, 0}}, {{outputs[i].handle, 0}}) == LAPILLI_OK);
  };
  Floats state(4);
  float total = 1;
  for (size_t i = 0; i < 12; ++i) {
    for (const size_t j : {i % 3, i * i % 3, (i + 1) % 3})
      run(j), ++total;
    if (i % 2 == 0)
      CHECK(outputs[(i + 1) % 3].read()[0] == total);
    CHECK(lapilli_state_read(program.handle, 0, state.data(), 16) == LAPILLI_OK && state[0] == total);
  }
}

TEST(wrong_calls_are_refused) {
  const Stream stream, other;
  const Program program(sum_program()), texel(sample_program());
  const Buffer a(stream, 256), b(stream, 256), foreign(other, 256);
  const lapilli_slice x{a.handle, 0}, y{b.handle, 0};
  const auto refused = [](lapilli_status status, const char* text) {
    return status == LAPILLI_INVALID_ARGUMENT && message_has(text);
  };
  CHECK(refused(enqueue(stream, program, {64}, {x}, {y}), "has 2 inputs and 1 outputs, and 1 and 1 were given"));
  CHECK(refused(enqueue(stream, program, {}, {x, x}, {y}), "has 1 symbols, and 0 values were given"));
  lapilli_tensor shapes[2] = {};
  const int64_t symbol = 3;
  CHECK(refused(lapilli_output_shapes(program.handle, 0, nullptr, 0, shapes, 1),
                "has 1 symbols, and 0 values were given"));
  CHECK(refused(lapilli_output_shapes(program.handle, 0, &symbol, 1, shapes, 2), "the shapes of 2 were asked for"));
  CHECK(lapilli_output_shapes(program.handle, 0, &symbol, 1, shapes, 1) == LAPILLI_OK && shapes[0].rank > 0);
  CHECK(refused(enqueue(stream, program, {0}, {x, x}, {y}), "Symbol N of method \"forward\" is 0"));
  CHECK(refused(enqueue(stream, texel, {17}, {x}, {y}), "the method takes 0..16"));
  CHECK(refused(enqueue(stream, program, {257}, {x, x}, {y}), "Input 0 (a) takes 1028 bytes, and the buffer has 1024"));
  CHECK(refused(enqueue(stream, program, {64}, {x, {a.handle, 16}}, {y}), "Input 1 (b) begins at byte 16"));
  CHECK(refused(enqueue(stream, program, {64}, {x, {a.handle, 4096}}, {y}), "Input 1 (b) takes 256 bytes"));
  CHECK(refused(enqueue(stream, program, {64}, {x, x}, {{foreign.handle, 0}}), "Output 0 (y) is not a buffer"));
  CHECK(refused(enqueue(stream, program, {64}, {x, {nullptr, 0}}, {y}), "Input 1 (b) is not a buffer"));
  CHECK(refused(enqueue(stream, program, {64}, {x, x}, {y}, 1), "There is no method 1"));
  CHECK(refused(lapilli_buffer_copy(a.handle, 0, foreign.handle, 0, 4), "different streams"));
  CHECK(refused(lapilli_buffer_copy(a.handle, 0, a.handle, 8, 16), "overlap"));
  CHECK(refused(lapilli_buffer_copy(a.handle, 1020, b.handle, 0, 8), "Bytes 1020 to 1028"));
  CHECK(refused(lapilli_buffer_fill(a.handle, 2, 4, 0), "by words of 4 bytes"));
  float value = 0;
  CHECK(refused(lapilli_buffer_read(a.handle, 1024, &value, 4), "Bytes 1024 to 1028"));
  CHECK(refused(lapilli_buffer_write(a.handle, UINT64_MAX, &value, 4), "of a buffer of 1024"));
  CHECK(refused(lapilli_enqueue(nullptr, program.handle, 0, nullptr, 0, nullptr, 0, nullptr, 0), "`stream` is null"));
  lapilli_stream* none = nullptr;
  lapilli_load_options options{};
  options.device = "no such device";
  CHECK(lapilli_stream_create(&options, &none) == LAPILLI_NO_DEVICE);
}

void try_large_copies() {
  const Stream stream;
  Floats values(9 * mebi + 5);
  std::iota(values.begin(), values.end(), 0.0f);
  const Program program(slow_program(64));
  const Buffer x(stream, Floats{1.0f}), y(stream, 64);
  CHECK(enqueue(stream, program, {}, {{x.handle, 0}}, {{y.handle, 0}}) == LAPILLI_OK);
  CHECK(lapilli_flush(stream.handle) == LAPILLI_OK);
  Buffer buffer(stream, values), copy(stream, values.size()); // while the device is at work
  CHECK(lapilli_buffer_copy(buffer.handle, 0, copy.handle, 0, 4 * values.size()) == LAPILLI_OK);
  buffer.write(Floats(values.size(), 0.0f));
  CHECK(copy.read() == values);
  CHECK(y.read() == Floats(64, 1.0f));
  // Bytes that are not words.
  CHECK(lapilli_buffer_copy(copy.handle, 0, buffer.handle, 3, 7) == LAPILLI_OK);
  std::vector<std::byte> bytes(7);
  CHECK(lapilli_buffer_read(buffer.handle, 3, bytes.data(), 7) == LAPILLI_OK);
  CHECK(std::memcmp(bytes.data(), values.data(), 7) == 0);
}

TEST(threads_share_a_stream) {
  const Stream stream;
  const Program program(sum_program());
  std::atomic<bool> correct{true};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const Buffer a(stream, Floats(300, static_cast<float>(t))), b(stream, Floats(300, static_cast<float>(i)));
        const Buffer c(stream, 300);
        const std::array<int64_t, 11> words{0,   1,
                                            2,   1,
                                            300, reinterpret_cast<intptr_t>(a.handle),
                                            0,   reinterpret_cast<intptr_t>(b.handle),
                                            0,   reinterpret_cast<intptr_t>(c.handle),
                                            0};
        if (lapilli_enqueue_packed(stream.handle, program.handle, reinterpret_cast<const char*>(words.data())) !=
            LAPILLI_OK)
          correct = false;
        if (i % 10 == 0 && c.read() != Floats(300, static_cast<float>(t + i)))
          correct = false;
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  CHECK(correct);
  CHECK(stream.memory().allocated == 0);
}

TEST(a_launch_makes_and_destroys_buffers) {
  const Stream stream;
  const Program program(sum_program());
  const Buffer a(stream, Floats(300, 1.0f)), b(stream, Floats(300, 2.0f));
  const uint64_t before = stream.memory().allocated;
  intptr_t last = 0;
  const auto launch = [&](intptr_t input, uint64_t offset, intptr_t unwanted) {
    const std::array<int64_t, 13> words{
        0, 1, 2, 1, unwanted, 1200, 300, input, static_cast<int64_t>(offset), reinterpret_cast<intptr_t>(b.handle),
        0, 0, 0};
    return lapilli_launch(stream.handle, program.handle, reinterpret_cast<const char*>(words.data()));
  };
  intptr_t unwanted = 0;
  last = reinterpret_cast<intptr_t>(a.handle);
  for (int i = 0; i < 200; ++i) { // each is the sum of the one before and 2
    const intptr_t next = launch(last, 0, unwanted);
    CHECK(next != 0);
    unwanted = i == 0 ? 0 : last;
    last = next;
  }
  Floats values(300);
  CHECK(lapilli_buffer_read(reinterpret_cast<lapilli_buffer*>(last), 0, values.data(), 1200) == LAPILLI_OK);
  CHECK(values == Floats(300, 401.0f));
  lapilli_buffer_release(unwanted);
  CHECK(launch(last, 4, 0) == 0); // not aligned
  lapilli_buffer_release(last);
  CHECK(stream.memory().allocated == before);
  CHECK(lapilli_launch(stream.handle, program.handle, nullptr) == 0);
}

TEST(a_stream_says_what_it_runs_on) {
  const Stream stream;
  char* json = nullptr;
  CHECK(lapilli_stream_info(stream.handle, &json) == LAPILLI_OK);
  const std::string text = json;
  lapilli_free(json);
  for (const char* key : {"\"device\":{", "\"alignment\":", "\"max_allocation\":", "\"memory\":"})
    CHECK(text.find(key) != std::string::npos);
}

TEST(validation_has_nothing_to_say) { CHECK(nothing_was_reported()); }

int main(int argc, char** argv) {
  try_validation();
  return run_tests(argc, argv);
}
