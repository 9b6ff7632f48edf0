// The parts that need neither a file nor a device.

#include "base/error.h"
#include "base/halves.h"
#include "base/json.h"
#include "base/parallel.h"
#include "base/private_file.h"
#include "base/text.h"
#include "check.h"
#include "core/inputs.h"
#include "core/planner.h"
#include "format/checksum.h"
#include "format/expr.h"
#include "format/float_controls.h"
#include "hal/known_faults.h"

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#if !defined(_WIN32)
#include <sys/stat.h>
#include <unistd.h>
#endif

using namespace lapilli;

namespace {
constexpr int64_t lowest = std::numeric_limits<int64_t>::min();
constexpr int64_t highest = std::numeric_limits<int64_t>::max();
} // namespace

// Which faults a device has, as golden decisions.
TEST(known_faults_are_those_of_their_devices) {
  struct Case {
    uint32_t vendor;
    const char *name, *driver;
    hal::Architecture machine;
    std::vector<std::string_view> faults;
  };
  using enum hal::Architecture;
  const std::vector<Case> cases{
      {0x10005,
       "llvmpipe (LLVM 15.0.6, 128 bits)",
       "llvmpipe Mesa 22.3.6 (LLVM 15.0.6)",
       arm64,
       {"llvmpipe-arm64-halves"}},
      {0x10005, "llvmpipe (LLVM 15.0.6, 256 bits)", "llvmpipe Mesa 22.3.6 (LLVM 15.0.6)", any, {}},
      {0x10005, "llvmpipe (LLVM 19.1.0, 128 bits)", "llvmpipe Mesa 25.0.7 (LLVM 19.1.0)", arm64, {}},
      {0x5143,
       "Adreno (TM) 640",
       "Qualcomm Technologies Inc. Adreno Vulkan Driver",
       arm64,
       {"adreno-matrices", "adreno-barriers"}},
      {0x5143, "Adreno (TM) 840", "", arm64, {"adreno-matrices", "adreno-barriers"}},
      {0x1002, "AMD Radeon RX 6800 XT (RADV NAVI21)", "radv Mesa 25.0.7", any, {"rdna2-matrices"}},
      {0x1002, "AMD Radeon RX 7900 XTX (RADV NAVI31)", "radv Mesa 25.0.7", any, {}},
      {0x13b5, "Mali-G78", "Mali v1.r38p1", arm64, {}},
      {0x10de, "NVIDIA H100 80GB HBM3", "NVIDIA 570.86", any, {}},
      {0, "", "", any, {}},
  };
  for (const Case& c : cases) {
    hal::Capabilities device;
    device.vendor_id = c.vendor;
    device.name = c.name;
    device.driver = c.driver;
    std::vector<std::string_view> names;
    for (const hal::KnownFault* fault : hal::faults_of(device, c.machine))
      names.push_back(fault->name);
    CHECK(names == c.faults);
  }
  for (const hal::KnownFault& fault : hal::known_faults())
    CHECK(!fault.name.empty() && !fault.source.empty() && !fault.symptom.empty() &&
          (fault.withheld != 0 || fault.no_half_conversions || fault.full_barriers));
}

TEST(what_a_known_fault_concerns_is_withheld) {
  hal::Capabilities device;
  device.vendor_id = 0x5143;
  device.name = "Adreno (TM) 750";
  device.features = static_cast<uint64_t>(Feature::cooperative_matrix) | static_cast<uint64_t>(Feature::float16);
  hal::withhold_known_faults(device);
  CHECK(!device.has(Feature::cooperative_matrix) && device.has(Feature::float16) && device.full_barriers);
  CHECK(device.known_faults == std::vector<std::string>({"adreno-matrices", "adreno-barriers"}));
  hal::Capabilities other;
  other.features = device.features;
  hal::withhold_known_faults(other);
  CHECK(other.features == device.features && other.known_faults.empty() && !other.full_barriers);
}

TEST(shared_work_is_done_once) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}}) {
    std::vector<std::atomic<int>> done(count);
    parallel(count, [&](size_t i) { ++done[i]; });
    for (const std::atomic<int>& times : done)
      CHECK(times == 1);
  }
}

TEST(the_first_error_of_shared_work_is_thrown) {
  for (int run = 0; run < 50; ++run) {
    std::atomic<int> done{0};
    std::string text;
    try {
      parallel(40, [&](size_t i) {
        ++done;
        if (i == 13 || i == 14 || i == 39)
          fail(LAPILLI_INTERNAL, "number ", i);
      });
    } catch (const Error& error) {
      text = error.what();
    }
    CHECK(done == 40 && text == "number 13");
  }
}

TEST(many_bytes_are_copied_as_few_are) {
  constexpr size_t piece = size_t{1} << 20;
  for (const size_t size : {size_t{0}, size_t{1}, piece - 1, 2 * piece - 1, 2 * piece, 3 * piece + 5}) {
    std::vector<unsigned char> from(size + 1), to(size + 1, 7);
    for (size_t i = 0; i <= size; ++i)
      from[i] = static_cast<unsigned char>(i * 31 + i / 4099);
    copy_bytes(to.data(), from.data(), size);
    CHECK(std::equal(from.begin(), from.end() - 1, to.begin()) && to[size] == 7);
  }
}

// The nearest half by its definition: multiples of 2^-24 below 2^-14, 11 bits above.
uint16_t nearest_half(float value) {
  if (std::isnan(value))
    return 0x7e00;
  const double magnitude = std::abs(static_cast<double>(value));
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  int exponent = 0;
  std::frexp(magnitude, &exponent); // magnitude < 2^exponent
  const int step = std::max(exponent - 11, -24);
  const double rounded = magnitude > 1e6 ? HUGE_VAL : std::ldexp(std::nearbyint(std::ldexp(magnitude, -step)), step);
  if (rounded >= 65536)
    return sign | 0x7c00;
  if (rounded < 0x1p-14)
    return static_cast<uint16_t>(sign | static_cast<int>(rounded * 0x1p24));
  std::frexp(rounded, &exponent);
  const double fraction = std::ldexp(rounded, 1 - exponent) - 1;
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | static_cast<int>(fraction * 1024));
}

TEST(floats_are_rounded_to_the_nearest_half) {
  std::vector<float> floats;
  const auto add = [&](uint32_t bits) { floats.push_back(std::bit_cast<float>(bits)); };
  for (uint32_t high = 0; high < 1u << 16; ++high)
    for (const uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2000u, 0x3000u, 0xffffu})
      add(high << 16 | low);
  std::mt19937 random(1);
  for (int i = 0; i < 100003; ++i)
    add(static_cast<uint32_t>(random()));
  const auto same = [](uint16_t a, uint16_t b) { return a == b || ((a & 0x7fff) > 0x7c00 && (b & 0x7fff) > 0x7c00); };
  std::vector<uint16_t> halves(floats.size() + 1, 7);
  round_to_halves(halves.data(), floats.data(), floats.size());
  bool right = halves.back() == 7;
  for (size_t i = 0; i < floats.size(); ++i)
    right = right && same(half_of(floats[i]), nearest_half(floats[i])) && same(halves[i], half_of(floats[i]));
  CHECK(right);
  for (size_t count = 0; count < 70; ++count) { // from where nothing is aligned
    std::vector<std::byte> from(4 * count + 1), to(2 * count + 2, std::byte{7});
    std::memcpy(from.data() + 1, floats.data() + 1000, 4 * count);
    round_to_halves(to.data() + 1, from.data() + 1, count);
    CHECK(std::memcmp(to.data() + 1, halves.data() + 1000, 2 * count) == 0);
    CHECK(to.front() == std::byte{7} && to.back() == std::byte{7});
  }
}

TEST(checksum_has_the_published_values) {
  CHECK(xxh64("", 0, 0) == 0xef46db3751d8e999u);
  CHECK(xxh64("a", 1, 0) == 0xd24ec4f1a98c6e5bu);
  CHECK(xxh64("abc", 3, 0) == 0x44bc2cf5ad770999u);
  const char text[] = "Nobody inspects the spammish repetition";
  CHECK(xxh64(text, sizeof text - 1, 0) == 0xfbcea83c8a378bf1u);
}

TEST(checksum_does_not_depend_on_the_pieces) {
  std::mt19937 random(1);
  std::vector<uint8_t> data(1000);
  for (uint8_t& byte : data)
    byte = static_cast<uint8_t>(random());
  const uint64_t whole = xxh64(data.data(), data.size(), 7);
  for (int i = 0; i < 100; ++i) {
    Xxh64 hash(7);
    for (size_t at = 0; at < data.size();) {
      const size_t piece = std::min<size_t>(random() % 70, data.size() - at);
      hash.update(data.data() + at, piece);
      at += piece;
    }
    CHECK(hash.digest() == whole);
  }
}

TEST(arithmetic_notices_overflow) {
  int64_t r = 0;
  CHECK(add(highest - 1, 1, r) && r == highest);
  CHECK(!add(highest, 1, r));
  CHECK(!add(lowest, -1, r));
  CHECK(!subtract(lowest, 1, r));
  CHECK(!subtract(0, lowest, r));
  CHECK(subtract(-1, lowest, r) && r == highest);
  CHECK(!multiply(lowest, -1, r));
  CHECK(!multiply(-1, lowest, r));
  CHECK(multiply(lowest, 1, r) && r == lowest);
  CHECK(!multiply(int64_t{1} << 32, int64_t{1} << 31, r));
  CHECK(multiply(int64_t{1} << 31, -(int64_t{1} << 32), r) && r == lowest);
  CHECK(multiply(0, highest, r) && r == 0);
  CHECK(floor_divide(-7, 2, r) && r == -4);
  CHECK(floor_divide(7, -2, r) && r == -4);
  CHECK(floor_divide(-8, -2, r) && r == 4);
  CHECK(!floor_divide(1, 0, r));
  CHECK(!floor_divide(lowest, -1, r));
  CHECK(floor_modulo(-7, 2, r) && r == 1);
  CHECK(floor_modulo(7, -2, r) && r == -1);
  CHECK(!floor_modulo(1, 0, r));
}

TEST(arithmetic_agrees_with_wide_integers) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 100000; ++i) {
    const auto a = static_cast<int64_t>(random()) >> (random() % 64);
    const auto b = static_cast<int64_t>(random()) >> (random() % 64);
    int64_t r = 0;
    __extension__ using Wide = __int128;
    const auto fits = [](Wide w) { return w >= lowest && w <= highest; };
    CHECK(add(a, b, r) == fits(Wide{a} + b) && (!fits(Wide{a} + b) || r == a + b));
    CHECK(subtract(a, b, r) == fits(Wide{a} - b) && (!fits(Wide{a} - b) || r == a - b));
    CHECK(multiply(a, b, r) == fits(Wide{a} * b) && (!fits(Wide{a} * b) || Wide{r} == Wide{a} * b));
  }
}

TEST(expressions_fail_only_when_used) {
  const std::vector<Expr> pool{{6, 0, 0, ExprOp::constant},
                               {0, 0, 0, ExprOp::symbol},
                               {0, 0, 1, ExprOp::floordiv}, // 6 // N
                               {0, 2, 0, ExprOp::add},      // 6 // N + 6
                               {0, 0, 1, ExprOp::max}};
  const Values three(pool, std::vector<int64_t>{3});
  CHECK(three[3] == 8);
  const Values zero(pool, std::vector<int64_t>{0});
  CHECK(zero[4] == 6);
  bool thrown = false;
  try {
    static_cast<void>(zero[3]);
  } catch (const std::exception&) {
    thrown = true;
  }
  CHECK(thrown);
  const std::vector<Symbol> symbols{{"N", 0, -1, 0, 0}};
  CHECK(Texts(pool, symbols)[3] == "((6 // N) + 6)");
}

TEST(long_expressions_stay_short) {
  std::vector<Expr> pool{{0, 0, 0, ExprOp::symbol}};
  for (uint32_t i = 0; i < 1000; ++i)
    pool.push_back({0, i, i, ExprOp::add}); // the text would double each time
  const std::vector<Symbol> symbols{{"N", 0, -1, 0, 0}};
  const Texts texts(pool, symbols);
  for (uint32_t i = 0; i < pool.size(); ++i)
    CHECK(texts[i].size() < 1000);
}

static void check_plan(const MemoryPlan& plan, const std::vector<Lifetime>& buffers, uint64_t limit) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    CHECK(plan.places[i].offset % 256 == 0);
    CHECK(plan.places[i].offset + buffers[i].size <= plan.blocks[plan.places[i].block]);
    for (size_t j = 0; j < i; ++j) {
      const bool together = buffers[i].first <= buffers[j].last && buffers[j].first <= buffers[i].last;
      const bool apart = plan.places[i].block != plan.places[j].block ||
                         plan.places[i].offset + buffers[i].size <= plan.places[j].offset ||
                         plan.places[j].offset + buffers[j].size <= plan.places[i].offset;
      CHECK(!together || apart);
    }
  }
  CHECK(plan.total >= plan.lower_bound && plan.total <= plan.sum);
  for (const uint64_t block : plan.blocks)
    CHECK(block <= limit);
}

TEST(planner_shares_memory_and_never_overlaps) {
  std::mt19937 random(3);
  for (int i = 0; i < 100; ++i) {
    std::vector<Lifetime> buffers(1 + random() % 60);
    for (Lifetime& buffer : buffers) {
      const auto first = static_cast<uint32_t>(random() % 50);
      buffer = {random() % 10000, first, first + static_cast<uint32_t>(random() % 6)};
    }
    const uint64_t limit = i % 2 == 0 ? uint64_t{1} << 40 : 16384;
    const MemoryPlan plan = plan_memory(buffers, 256, limit);
    check_plan(plan, buffers, limit);
    const MemoryPlan again = plan_memory(buffers, 256, limit);
    for (size_t j = 0; j < buffers.size(); ++j)
      CHECK(plan.places[j].offset == again.places[j].offset && plan.places[j].block == again.places[j].block);
  }
}

// The blocks of ResNet50 as Winograd's steps make them: a value of 16 that is added at the end lives beside 4, 9, 9, 4.
TEST(planner_searches_for_what_no_order_gives) {
  std::vector<Lifetime> buffers;
  // clang-format off
  const std::vector<std::array<uint32_t, 3>> values{
      {40, 0, 1}, {160, 1, 2}, {40, 2, 8}, {40, 3, 4}, {90, 4, 5}, {90, 5, 6}, {40, 6, 7}, {160, 7, 8}, {160, 8, 13},
      {40, 9, 10}, {90, 10, 11}, {90, 11, 12}, {40, 12, 13}, {160, 13, 18}, {40, 14, 15}, {90, 15, 16}, {90, 16, 17},
      {40, 17, 18}, {160, 18, 22}, {80, 19, 20}, {20, 20, 21}, {80, 21, 22}};
  // clang-format on
  for (const auto& [size, first, last] : values)
    buffers.push_back({size * 1024, first, last});
  const MemoryPlan plan = plan_memory(buffers, 256, uint64_t{1} << 40);
  check_plan(plan, buffers, uint64_t{1} << 40);
  CHECK(plan.total <= plan.lower_bound * 11 / 10);
}

TEST(planner_reaches_the_bound_for_a_chain) {
  std::vector<Lifetime> chain;
  for (uint32_t i = 0; i < 20; ++i)
    chain.push_back({1024, i, i + 1});
  const MemoryPlan plan = plan_memory(chain, 256, uint64_t{1} << 40);
  CHECK(plan.total == 2048 && plan.lower_bound == 2048 && plan.sum == 20 * 1024);
}

TEST(json_is_always_valid) {
  Json json;
  json.object([&] {
    json.field("a\"b", "tab\tquote\"back\\");
    json.field("bad", std::string_view("x\xff\xc3(\xe2\x82", 6));
    json.field("good", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x8c\x8b");
    json.list("numbers", std::vector<int>{1, -2});
    json.field("flag", true);
    json.key("nothing");
    json.null();
  });
  CHECK(json.text() ==
        "{\"a\\\"b\":\"tab\\u0009quote\\\"back\\\\\",\"bad\":\"x\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\","
        "\"good\":\"\xc3\xa4\xe2\x82\xac\xf0\x9f\x8c\x8b\",\"numbers\":[1,-2],\"flag\":true,\"nothing\":null}");
}

TEST(text_for_people) {
  CHECK(human_size(512) == "512 bytes");
  CHECK(human_size(uint64_t{3} << 20) == "3.0 MiB");
  CHECK(human_size(1024) == "1.0 KiB" && human_size((1 << 20) - 1) == "1024.0 KiB" && human_size(1280) == "1.2 KiB");
  CHECK(human_size(1792) == "1.8 KiB" && human_size(UINT64_MAX) == "16777216.0 TiB");
  CHECK(listed(std::vector<std::string>{"a", "b", "c"}) == "a, b and c");
  CHECK(listed(std::vector<std::string>{}).empty());
  CHECK(contains_ignoring_case("NVIDIA H100", "h100") && !contains_ignoring_case("llvmpipe", "nvidia"));
}

TEST(integers_are_compared_with_any_limit) {
  for (const int64_t limit : {int64_t{0}, int64_t{1}, int64_t{1} << 62, INT64_MAX}) {
    const std::vector<int64_t> values{0, 1, -1, INT64_MAX, INT64_MIN};
    bool thrown = false;
    try {
      check_integers(std::as_bytes(std::span(values)), limit, [] { return std::string("it"); });
    } catch (const std::exception&) {
      thrown = true;
    }
    CHECK(thrown); // the smallest number is beyond every limit
    check_integers(std::as_bytes(std::span(values)).first(24), limit, [] { return std::string("it"); });
  }
}

// Expressions of every operator over numbers at the ends of the range: each has the value of Python's integers, or none.
TEST(random_expressions) {
  std::mt19937_64 random(3);
  const auto number = [&] {
    const std::array<int64_t, 9> special{0, 1, -1, 2, -2, lowest, lowest + 1, highest, highest - 1};
    const auto which = random() % 16;
    return which < special.size() ? special[which] : static_cast<int64_t>(random()) >> random() % 64;
  };
  __extension__ using Wide = __int128;
  bool same = true;
  for (int round = 0; round < 300; ++round) {
    std::array<int64_t, 3> symbols{number(), number(), number()};
    std::vector<Expr> pool;
    std::vector<std::optional<Wide>> wanted;
    for (uint32_t i = 0; i < 120; ++i) {
      const auto op = static_cast<ExprOp>(random() % 9);
      Expr expr{};
      expr.op = i < 4 ? ExprOp::constant : op;
      if (expr.op == ExprOp::constant) {
        expr.value = number();
        wanted.push_back(expr.value);
      } else if (expr.op == ExprOp::symbol) {
        expr.value = static_cast<int64_t>(random() % symbols.size());
        wanted.push_back(symbols[static_cast<size_t>(expr.value)]);
      } else {
        expr.a = static_cast<ExprIndex>(random() % i);
        expr.b = static_cast<ExprIndex>(random() % i);
        const std::optional<Wide> a = wanted[expr.a], b = wanted[expr.b];
        std::optional<Wide> value;
        const bool divides = expr.op == ExprOp::floordiv || expr.op == ExprOp::mod;
        if (a && b && !(divides && *b == 0)) {
          const Wide quotient = divides ? *a / *b - (*a % *b != 0 && (*a < 0) != (*b < 0) ? 1 : 0) : 0;
          value = expr.op == ExprOp::add        ? *a + *b
                  : expr.op == ExprOp::sub      ? *a - *b
                  : expr.op == ExprOp::mul      ? *a * *b
                  : expr.op == ExprOp::floordiv ? quotient
                  : expr.op == ExprOp::mod      ? *a - quotient * *b
                  : expr.op == ExprOp::min      ? std::min(*a, *b)
                                                : std::max(*a, *b);
          // The rest of the smallest number and -1 is 0, which the processor cannot say.
          if (*value < lowest || *value > highest || (divides && *a == lowest && *b == -1))
            value.reset();
        }
        wanted.push_back(value);
      }
      pool.push_back(expr);
    }
    const Values values(pool, symbols);
    for (uint32_t i = 0; i < pool.size(); ++i) {
      std::optional<Wide> got;
      try {
        got = values[i];
      } catch (const Error&) {
        got.reset();
      }
      same = same && got == wanted[i] &&
             values.or_zero(i) == (wanted[i] && *wanted[i] > 0 ? static_cast<uint64_t>(*wanted[i]) : 0);
    }
  }
  CHECK(same);
}

// Plans of any sizes, also of nothing, and with limits that nothing fits: blocks hold what is placed in them.
TEST(plans_of_odd_sizes) {
  std::mt19937 random(5);
  bool good = true;
  for (int round = 0; round < 200; ++round) {
    std::vector<Lifetime> buffers(random() % 12);
    std::vector<uint64_t> sizes;
    for (Lifetime& buffer : buffers) {
      buffer.size = random() % 3 == 0 ? 0 : uint64_t{1} << random() % 40;
      buffer.first = static_cast<uint32_t>(random() % 6);
      buffer.last = buffer.first + static_cast<uint32_t>(random() % 6);
      sizes.push_back(buffer.size);
    }
    const uint64_t alignment = uint64_t{1} << random() % 13,
                   limit = random() % 4 == 0 ? 0 : uint64_t{1} << random() % 42;
    const MemoryPlan shared = plan_memory(buffers, alignment, limit),
                     apart = plan_without_sharing(sizes, alignment, limit);
    for (const MemoryPlan& plan : {shared, apart})
      for (size_t i = 0; i < sizes.size(); ++i)
        good = good && plan.places[i].offset % alignment == 0 &&
               plan.places[i].offset + sizes[i] <= plan.blocks[plan.places[i].block];
  }
  CHECK(good);
}

#if !defined(_WIN32)
TEST(private_files) {
  namespace fs = std::filesystem;
  const fs::path folder = "units-private", path = folder / "a" / "b" / "cache.bin";
  fs::remove_all(folder);
  const mode_t mask = umask(0);
  const std::array<std::byte, 5> data{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}, std::byte{5}};
  const std::array<Bytes, 2> parts{Bytes(data).first(2), Bytes(data).subspan(2)};
  const std::vector<std::byte> whole(data.begin(), data.end());
  const auto mode = [](const fs::path& file) { return static_cast<unsigned>(fs::status(file).permissions()); };
  CHECK(replace_private_file(path, parts) && read_private_file(path, 5) == whole);
  CHECK(mode(path) == 0600 && mode(folder / "a") == 0700 && mode(folder / "a" / "b") == 0700);
  CHECK(replace_private_file(path, parts)); // over the one that is there
  CHECK(read_private_file(path, 4).empty() && read_private_file(folder / "none", 5).empty());
  // What others may have written is not read.
  for (const unsigned open : {0620u, 0602u, 0666u}) {
    fs::permissions(path, static_cast<fs::perms>(open));
    CHECK(read_private_file(path, 5).empty());
  }
  fs::permissions(path, static_cast<fs::perms>(0644));
  CHECK(read_private_file(path, 5) == whole);
  // Links and pipes are not followed.
  const fs::path link = folder / "link", pipe = folder / "pipe";
  fs::create_symlink(fs::absolute(path), link);
  CHECK(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(read_private_file(link, 5).empty() && read_private_file(pipe, 5).empty() &&
        read_private_file(folder, 5).empty());
  // Whatever lies where the next temporary files would be stays as it is.
  for (int i = 0; i < 64; ++i) {
    const fs::path temporary = path.string() + "." + std::to_string(getpid()) + "." + std::to_string(i) + ".tmp";
    fs::create_symlink(fs::absolute(folder / "victim"), temporary);
  }
  replace_private_file(path, parts);
  CHECK(!fs::exists(folder / "victim"));
  // Left by processes that were ended.
  const fs::path left = path.string() + ".1.0.tmp", young = path.string() + ".2.0.tmp",
                 other = path.string() + "x.3.0.tmp";
  for (const fs::path& file : {left, young, other})
    CHECK(replace_private_file(file, parts));
  for (const fs::path& file : {left, other})
    fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::hours(2));
  const fs::path beside = path.parent_path() / "cache.bin";
  for (const fs::directory_entry& entry : fs::directory_iterator(path.parent_path()))
    if (entry.is_symlink())
      fs::remove(entry.path());
  CHECK(replace_private_file(beside, parts));
  CHECK(!fs::exists(left) && fs::exists(young) && fs::exists(other));
  // Paths of any form.
  const std::string long_way = path_in(path_in((folder / "c").string() + "//", "d"), "cache.bin"),
                    here = "units-cache.bin";
  CHECK(long_way == (folder / "c").string() + "//d/cache.bin" && path_in("/", "x") == "/x");
  for (const std::string& file : {long_way, here})
    CHECK(replace_private_file(file, parts) && read_private_file(file, 5) == whole);
  CHECK(!replace_private_file("", parts) && !replace_private_file("/proc/no/such/cache.bin", parts));
  fs::remove(here);
  umask(mask);
  fs::remove_all(folder);
}
#endif

TEST(integers_beyond_32_bits_are_refused) {
  const auto message = [](std::vector<int64_t> values, int64_t limit = 0) {
    try {
      check_integers(std::as_bytes(std::span(values)), limit, [] { return std::string("Input 0"); });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message({}).empty());
  CHECK(message({0, -1, 2147483647, -2147483648}).empty());
  CHECK(message({7, 2147483648}).find("Input 0; element 1 is 2147483648") == 0);
  CHECK(message({-2147483649}).find("element 0 is -2147483649") != std::string::npos);
  CHECK(message({lowest, highest}).find("element 0") != std::string::npos);
  CHECK(message({100, -100}, 100).empty());
  CHECK(message({100, 101}, 100).find("element 1 is 101") != std::string::npos);
  CHECK(message({-101}, 100).find("(-100..100)") != std::string::npos);
  CHECK(message({lowest}, 100).find("element 0") != std::string::npos);
}

TEST(float_controls_go_where_spirv_wants_them) {
  // OpCapability Shader; OpMemoryModel; OpEntryPoint GLCompute %4 "main"; OpExecutionMode %4 LocalSize 1 1 1
  const std::array<uint32_t, 20> module{0x07230203, 0x00010300, 0, 10,         0, 0x00020011, 1, 0x0003000e, 0, 1,
                                        0x0005000f, 5,          4, 0x6e69616d, 0, 0x00060010, 4, 17,         1, 1};
  std::vector<uint32_t> whole(module.begin(), module.end());
  whole.push_back(1);
  CHECK(with_float_controls(whole, {}) == whole); // the device promises nothing
  FloatControls controls;
  controls.special_32 = controls.special_16 = controls.denormal_32 = true;
  const std::vector<uint32_t> result = with_float_controls(whole, controls);
  const std::vector<uint32_t> extension{0x0007000a, 0x5f565053, 0x5f52484b, 0x616f6c66,
                                        0x6f635f74, 0x6f72746e, 0x0000736c};
  std::vector<uint32_t> expected(whole.begin(), whole.begin() + 7);
  expected.insert(expected.end(), {0x00020011, 4466, 0x00020011, 4464});
  expected.insert(expected.end(), extension.begin(), extension.end());
  expected.insert(expected.end(), whole.begin() + 7, whole.begin() + 15);
  expected.insert(expected.end(), {0x00040010, 4, 4461, 32, 0x00040010, 4, 4459, 32});
  expected.insert(expected.end(), whole.begin() + 15, whole.end());
  CHECK(result == expected);                              // nothing of 16 bits: the module has no such floats
  CHECK(with_float_controls(result, controls) == result); // it says so itself by now
  whole[1] = 0x00010400;                                  // core since 1.4
  CHECK(with_float_controls(whole, controls).size() == result.size() - extension.size());
  whole.resize(17); // cut off: as it is
  CHECK(with_float_controls(whole, controls) == whole);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
