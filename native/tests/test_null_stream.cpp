// Streams without a driver: batches, barriers, memory that is shared, and what is handed out.

#include "null.h"

using namespace lapilli;

namespace {

constexpr uint64_t mebi = 1 << 20;

// A buffer of floats that is destroyed at the end of the scope.
class DeviceValues {
public:
  DeviceValues(Stream& stream, size_t count) : handle(stream.create_buffer(4 * count)), count_(count) {}
  DeviceValues(Stream& stream, const Floats& values) : DeviceValues(stream, values.size()) {
    stream.write(*handle, 0, std::as_bytes(std::span(values)));
  }
  ~DeviceValues() {
    if (handle != nullptr)
      handle->stream->destroy(handle);
    delete handle;
  }
  DeviceValues(DeviceValues&& other) noexcept : handle(std::exchange(other.handle, nullptr)), count_(other.count_) {}
  DeviceValues& operator=(DeviceValues&& other) noexcept {
    std::swap(handle, other.handle);
    std::swap(count_, other.count_);
    return *this;
  }
  Floats read() const {
    Floats values(count_);
    handle->stream->read(*handle, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }
  hal::Region region() const { return handle->block->region(); }

  lapilli_buffer* handle;

private:
  size_t count_;
};

struct Fixture {
  explicit Fixture(const FileBytes& file = sum_program(), hal::Capabilities of = null::integrated_gpu())
      : device(null_device(std::move(of))), program(load(file, device)), stream(Stream::create(device)) {
    device->submitted.clear();
  }

  void sum(lapilli_slice a, lapilli_slice b, lapilli_slice c, int64_t count = 64) {
    const std::array<int64_t, 1> symbols{count};
    const std::array<lapilli_slice, 3> slices{a, b, c};
    stream->enqueue(program, 0, symbols, 2, slices);
  }
  void sum(const DeviceValues& a, const DeviceValues& b, const DeviceValues& c) {
    sum({a.handle, 0}, {b.handle, 0}, {c.handle, 0});
  }
  // What was recorded since the last call.
  Recorded flushed() {
    stream->flush();
    Recorded all;
    for (const Recorded& commands : device->submitted)
      all.insert(all.end(), commands.begin(), commands.end());
    device->submitted.clear();
    return all;
  }

  std::shared_ptr<null::Device> device;
  std::shared_ptr<Program> program;
  std::shared_ptr<Stream> stream;
};

} // namespace

TEST(barriers_are_where_something_is_waited_for) {
  Fixture on;
  const DeviceValues a(*on.stream, Floats(64, 1.0f)), b(*on.stream, Floats(64, 2.0f));
  const DeviceValues c(*on.stream, 64), d(*on.stream, 64), e(*on.stream, 64);
  on.sum(a, b, c);
  on.sum(a, b, d);
  on.sum(c, d, e); // reads what was written
  on.sum(a, a, c); // writes what is read
  const Recorded all = on.flushed();
  CHECK(summary(all) == "b d0 d0 b d0 b d0 b");
  CHECK(is_ordered(all) && !is_ordered(only(all, Kind::dispatch)));
  CHECK(all.back().after == hal::Stage::host_read);
  CHECK(c.read() == Floats(64, 2.0f) && d.read() == Floats(64, 3.0f) && e.read() == Floats(64, 6.0f));
}

// Views of 64 KiB are made a little longer on software devices, and the layers take what a view shows for read.
TEST(what_a_longer_view_shows_is_waited_for) {
  hal::Capabilities cpu = null::integrated_gpu();
  cpu.type = hal::DeviceType::cpu;
  constexpr uint32_t count = 1u << 14;
  for (const bool software : {true, false}) {
    Fixture on(texel_program(count), software ? cpu : null::integrated_gpu());
    const DeviceValues both(*on.stream, Floats(2 * count, 1.0f)), y(*on.stream, count);
    on.flushed();
    const std::array<lapilli_slice, 2> apart{{{both.handle, 0}, {y.handle, 0}}};
    on.stream->enqueue(on.program, 0, {}, 1, apart);
    on.stream->fill(*both.handle, 4 * count, 256, 0);
    CHECK(summary(on.flushed()) == (software ? "b d0 b f b" : "b d0 f b"));
    // Beside each other in one buffer: what is shown must not be written by the same run.
    const std::array<lapilli_slice, 2> beside{{{both.handle, 0}, {both.handle, 4 * count}}};
    on.stream->enqueue(on.program, 0, {}, 1, beside);
    CHECK(summary(on.flushed()) == (software ? "b d0 b c b" : "b d0 b"));
    CHECK(both.read()[count] == 2.0f);
  }
}

TEST(bindings_are_the_slices) {
  Fixture on;
  const DeviceValues a(*on.stream, 256), b(*on.stream, 256), c(*on.stream, 256);
  on.sum({a.handle, 256}, {b.handle, 0}, {c.handle, 512});
  const Recorded kernels = only(on.flushed(), Kind::dispatch);
  const std::vector<hal::Region>& bound = kernels.at(0).bindings;
  CHECK(bound[0].buffer == a.region().buffer && bound[0].offset == a.region().offset + 256);
  CHECK(bound[1].offset == b.region().offset && bound[2].offset == c.region().offset + 512);
  CHECK(bound[0].size == 256 && bound[2].size == 256);
}

TEST(an_output_in_the_place_of_an_input) {
  Fixture on;
  const DeviceValues a(*on.stream, Floats(128, 1.0f)), b(*on.stream, Floats(128, 2.0f));
  on.sum(a, b, a); // the kernel reads and writes each element once
  CHECK(summary(on.flushed()) == "b d0 b");
  on.sum({a.handle, 0}, {b.handle, 0}, {a.handle, 256}); // another part of the same buffer
  CHECK(summary(on.flushed()) == "b d0 b");
  // Here it would read what it wrote: the result goes elsewhere and is copied.
  const DeviceValues x(*on.stream, Floats(192, 1.0f));
  on.sum({x.handle, 0}, {x.handle, 0}, {x.handle, 256}, 128);
  const Recorded all = on.flushed();
  CHECK(summary(all) == "b d0 b c b" && is_ordered(all));
  CHECK(only(all, Kind::copy)[0].to.offset == x.region().offset + 256 && only(all, Kind::copy)[0].to.size == 512);
  Floats expected(192, 2.0f);
  std::fill_n(expected.begin(), 64, 1.0f);
  CHECK(x.read() == expected);
}

TEST(arenas_are_given_back_at_once) {
  Fixture on(sample_program({.width = 64, .max_batch = 64}));
  const DeviceValues x(*on.stream, Floats(4096, 1.0f)), y(*on.stream, 4096);
  const std::array<int64_t, 1> symbols{64};
  const std::array<lapilli_slice, 2> slices{{{x.handle, 0}, {y.handle, 0}}};
  const uint64_t before = on.stream->memory().allocated;
  on.stream->enqueue(on.program, 0, symbols, 1, slices);
  on.stream->enqueue(on.program, 0, symbols, 1, slices);
  CHECK(on.stream->memory().allocated == before);
  const Recorded all = on.flushed();
  CHECK(summary(all) == "b d0 b d1 b d0 b d0 b d1 b d0 b" && is_ordered(all));
  const Recorded kernels = only(all, Kind::dispatch);
  CHECK(kernels[0].bindings[2].offset == kernels[3].bindings[2].offset); // the same memory, after a barrier
}

TEST(sets_are_made_before_anything_is_recorded) {
  auto device = null_device();
  device->uses_sets = true;
  const auto program = load(sample_program(), device);
  const auto stream = Stream::create(device);
  const DeviceValues x(*stream, Floats(21, 1.0f)), y(*stream, 21);
  const std::array<int64_t, 1> symbols{3};
  const std::array<lapilli_slice, 2> slices{{{x.handle, 0}, {y.handle, 0}}};
  for (int i = 0; i < 3; ++i)
    stream->enqueue(program, 0, symbols, 1, slices);
  const Floats result = y.read();
  for (size_t i = 0; i < result.size(); ++i)
    CHECK(result[i] == sample_result(1.0f, static_cast<uint32_t>(i % 7)));
}

TEST(batches_grow_while_the_device_is_busy) {
  Fixture on;
  on.device->holds = true;
  std::vector<DeviceValues> buffers;
  for (int i = 0; i < 3; ++i)
    buffers.emplace_back(*on.stream, Floats(64, 1.0f));
  on.device->submitted.clear();
  for (int i = 0; i < 300; ++i)
    on.sum(buffers[0], buffers[1], buffers[2]);
  std::vector<size_t> sizes;
  for (const Recorded& commands : on.device->submitted) {
    sizes.push_back(only(commands, Kind::dispatch).size());
    CHECK(commands.front().kind == Kind::barrier); // after the batch before it
  }
  CHECK(sizes == std::vector<size_t>({8, 128, 128})); // the first as soon as the device is seen to be idle
  CHECK(only(on.flushed(), Kind::dispatch).size() == 300);
}

TEST(waiting_lets_programs_go) {
  Fixture on;
  on.device->holds = true;
  const DeviceValues a(*on.stream, Floats(64, 1.0f)), b(*on.stream, 64);
  const std::weak_ptr<Program> program = on.program;
  on.sum(a, a, b);
  on.stream->flush();
  on.program.reset();
  CHECK(!program.expired()); // the device may still be at it
  on.stream->synchronize();
  CHECK(program.expired());
}

TEST(states_on_a_stream) {
  Fixture on(state_program());
  const DeviceValues x(*on.stream, Floats(4, 1.0f)), y(*on.stream, 4), z(*on.stream, 4);
  const auto add = [&](const DeviceValues& to) {
    const std::array<lapilli_slice, 2> slices{{{x.handle, 0}, {to.handle, 0}}};
    on.stream->enqueue(on.program, 0, {}, 1, slices);
  };
  add(y);
  add(z); // the states are all that both use
  const Recorded all = on.flushed();
  CHECK(summary(all) == "b d0 b d1 b d0 b d1 b");
  CHECK(y.read() == Floats({2, 3, 4, 5}) && z.read() == Floats({3, 4, 5, 6}));
}

// Runs, copies, fills and writes in a random order: results as on the host, and a barrier wherever one depends on another.
TEST(everything_is_in_order) {
  constexpr size_t count = 5, size = 64, slices = 4, whole = size * slices;
  for (const unsigned kind : {0u, 1u, 2u, 3u}) {
    const bool staged = kind % 2 == 1;
    Fixture on(sum_program(), staged ? null::discrete_gpu() : null::integrated_gpu());
    on.device->holds = kind / 2 == 1; // as late as can be, or at once
    std::mt19937 random(kind);
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    std::vector<Floats> host(count, Floats(whole, 1.0f));
    std::vector<DeviceValues> device;
    for (const Floats& values : host)
      device.emplace_back(*on.stream, values);
    for (int step = 0; step < 2000; ++step) {
      const size_t a = below(count), b = below(count), c = below(count);
      const size_t i = below(slices) * size, j = below(slices) * size, k = below(slices) * size;
      const auto at = [&](size_t buffer, size_t first) { return host[buffer].begin() + static_cast<ptrdiff_t>(first); };
      switch (below(8)) {
      case 0: {
        const Floats values(size, static_cast<float>(below(100)));
        std::ranges::copy(values, at(c, k));
        on.stream->write(*device[c].handle, 4 * k, std::as_bytes(std::span(values)));
        break;
      }
      case 1:
        std::fill_n(at(c, k), size, 1.0f);
        on.stream->fill(*device[c].handle, 4 * k, 4 * size, 0x3f800000);
        break;
      case 2:
        if (a == c && i == k)
          break;
        std::copy_n(at(a, i), size, at(c, k));
        on.stream->copy(*device[a].handle, 4 * i, *device[c].handle, 4 * k, 4 * size);
        break;
      default:
        on.sum({device[a].handle, 4 * i}, {device[b].handle, 4 * j}, {device[c].handle, 4 * k}, size);
        std::transform(at(a, i), at(a, i) + size, at(b, j), at(c, k), std::plus());
      }
    }
    bool same = true;
    for (size_t i = 0; i < count; ++i)
      same = same && device[i].read() == host[i];
    CHECK(same);
    bool ordered = true;
    for (const Recorded& commands : on.device->submitted)
      ordered = ordered && commands.front().kind == Kind::barrier && is_ordered(commands);
    CHECK(ordered);
  }
}

// More than the ring of staging memory holds passes through it while nothing that is submitted takes place.
TEST(what_is_staged_stays_until_it_is_read) {
  Fixture on(sum_program(), null::discrete_gpu());
  on.device->holds = true;
  std::mt19937 random(7);
  std::vector<DeviceValues> buffers;
  std::vector<Floats> values;
  for (int i = 0; i < 60; ++i) {
    values.emplace_back(1 + random() % (i % 7 == 0 ? 2 * mebi : 60'000), static_cast<float>(i + 1));
    buffers.emplace_back(*on.stream, values.back());
  }
  CHECK(on.device->submitted.size() > 2);
  bool same = true;
  for (size_t i = 0; i < values.size(); ++i)
    same = same && buffers[i].read() == values[i];
  CHECK(same);
}

TEST(memory_is_used_again) {
  Fixture on;
  Stream& stream = *on.stream;
  for (int i = 0; i < 100; ++i)
    const DeviceValues buffer(stream, 1000), large(stream, 3 * mebi);
  const lapilli_stream_memory_info info = stream.memory();
  CHECK(info.allocated == 0 && info.allocations == 2 && info.reserved == 40 * mebi);
  CHECK(info.peak_allocated >= 12 * mebi + 4000 && info.peak_allocated < 13 * mebi);
  stream.reset_peak_memory();
  CHECK(stream.memory().peak_allocated == 0);
  stream.empty_cache();
  CHECK(stream.memory().reserved == 0 && stream.memory().allocations == 0);
  const DeviceValues again(stream, Floats(1000, 3.0f));
  CHECK(again.read() == Floats(1000, 3.0f));
}

// Sizes of all kinds come and go at random; each buffer keeps what was written to it.
TEST(buffers_do_not_overlap) {
  Fixture on;
  Stream& stream = *on.stream;
  std::mt19937 random(11);
  struct Held {
    DeviceValues buffer;
    float value;
    size_t size;
  };
  std::vector<Held> held;
  bool same = true;
  for (int step = 0; step < 1200; ++step) {
    if (held.size() < 40 && random() % 5 < 3) {
      const size_t size = 1 + random() % (random() % 10 == 0 ? 700'000 : random() % 3 == 0 ? 30'000 : 300);
      DeviceValues buffer(stream, size);
      const auto value = static_cast<float>(step);
      uint32_t pattern = 0;
      std::memcpy(&pattern, &value, 4);
      stream.fill(*buffer.handle, 0, 4 * size, pattern);
      held.push_back({std::move(buffer), value, size});
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      same = same && held.back().buffer.read() == Floats(held.back().size, held.back().value);
      held.pop_back();
    }
    if (step % 300 == 299)
      stream.empty_cache();
  }
  CHECK(same);
  held.clear();
  CHECK(stream.memory().allocated == 0);
  stream.empty_cache();
  CHECK(stream.memory().reserved == 0);
}

TEST(a_memory_limit) {
  Fixture on;
  Stream& stream = *on.stream;
  stream.set_memory_limit(20 * mebi);
  const DeviceValues kept(stream, Floats(2 * mebi, 1.0f)); // 8 MiB
  {
    const DeviceValues passing(stream, 2 * mebi);
  }
  const DeviceValues larger(stream, 5 * mebi / 2); // only without what is cached
  const std::string refused = thrown([&] { stream.create_buffer(4 * mebi); });
  CHECK(has(refused, "has not enough memory for 4.0 MiB: 18.0 MiB are in use"));
  CHECK(has(refused, "the limit that was set is 20.0 MiB"));
  CHECK(has(thrown([&] { stream.create_buffer(uint64_t{1} << 50); }), "has not enough memory"));
  stream.set_memory_limit(0);
  CHECK(stream.memory().limit == 0);
  const DeviceValues enough(stream, mebi);
  CHECK(kept.read() == Floats(2 * mebi, 1.0f));
}

TEST(a_lost_device_ends_a_stream) {
  Fixture on;
  const DeviceValues a(*on.stream, Floats(64, 1.0f));
  on.sum(a, a, a);
  on.device->lose();
  CHECK(has(thrown([&] { on.stream->synchronize(); }), "The device of this stream stopped working"));
  CHECK(has(thrown([&] { static_cast<void>(a.read()); }), "The device of this stream stopped working"));
  CHECK(on.stream->lost());
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
