// Damaged files: every one must be refused, or described without harm. Built with AddressSanitizer by LAPILLI_ASAN=ON.

#include "check.h"
#include "lapilli.h"
#include "samples.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace {

struct Outcome {
  lapilli_status status;
  std::string text;
};

Outcome describe(const FileBytes& file) {
  const FileBytes copy(file.begin(), file.end()); // exactly as long as the file: reading beyond is noticed
  char* json = nullptr;
  const lapilli_status status = lapilli_describe(copy.data(), copy.size(), 0, nullptr, &json);
  Outcome outcome{status, status == LAPILLI_OK ? json : lapilli_last_error()};
  lapilli_free(json);
  return outcome;
}

lapilli_status plan(const FileBytes& file, int64_t batch) {
  char* json = nullptr;
  const lapilli_status status = lapilli_plan_memory(file.data(), file.size(), 0, 0, 0, &batch, 1, &json);
  lapilli_free(json);
  return status;
}

bool expected(lapilli_status status) {
  return status == LAPILLI_OK || status == LAPILLI_INVALID_FILE || status == LAPILLI_OUT_OF_MEMORY ||
         status == LAPILLI_INVALID_ARGUMENT;
}

void mutate(FileBytes& file, std::mt19937& random) {
  const auto byte = [&] { return static_cast<std::byte>(random()); };
  const auto place = [&] { return random() % file.size(); };
  switch (random() % 6) {
  case 0: // one bit
    file[place()] ^= static_cast<std::byte>(1u << (random() % 8));
    break;
  case 1: // a few bytes
    for (uint32_t i = 0; i < 1 + random() % 8; ++i)
      file[place()] = byte();
    break;
  case 2: { // a 32-bit number at its edges
    constexpr uint32_t edges[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffffe, 64, 0x10000};
    const size_t at = place() / 4 * 4;
    const uint32_t value = edges[random() % std::size(edges)];
    if (at + 4 <= file.size())
      std::memcpy(file.data() + at, &value, 4);
    break;
  }
  case 3: // truncated
    file.resize(place());
    break;
  case 4: // longer
    for (uint32_t i = 0; i < 1 + random() % 100; ++i)
      file.push_back(byte());
    break;
  default: { // a piece copied to elsewhere
    const size_t from = place(), to = place();
    const size_t length = std::min({size_t{1} + random() % 64, file.size() - from, file.size() - to});
    std::memmove(file.data() + to, file.data() + from, length);
    break;
  }
  }
}

} // namespace

TEST(the_sample_is_described) {
  const Outcome outcome = describe(sample_program());
  CHECK(outcome.status == LAPILLI_OK);
  CHECK(outcome.text.find("\"forward\"") != std::string::npos);
  CHECK(outcome.text.find("(N * 7)") != std::string::npos);
  CHECK(plan(sample_program(), 3) == LAPILLI_OK);
  CHECK(describe(sample_program({.texel = true})).status == LAPILLI_OK);
}

TEST(factor_and_offset_of_a_symbol) {
  const Outcome outcome = describe(sample_program({.factor = 2, .offset = -1}));
  CHECK(outcome.status == LAPILLI_OK);
  CHECK(outcome.text.find("\"factor\":2,\"offset\":-1") != std::string::npos);
  for (const int64_t factor : {0, -3}) {
    const Outcome refused = describe(sample_program({.factor = factor}));
    CHECK(refused.status == LAPILLI_INVALID_FILE && refused.text.find("has factor") != std::string::npos);
  }
}

TEST(states_and_host_operators_are_described) {
  const Outcome outcome = describe(state_program({.host_operators = {"aten.svd", "aten.qr"}}));
  CHECK(outcome.status == LAPILLI_OK);
  const char* total = "\"states\":[{\"name\":\"total\",\"dtype\":\"float32\",\"shape\":[4],\"size\":16,\"constant\":0}";
  CHECK(outcome.text.find(total) != std::string::npos);
  CHECK(outcome.text.find("\"constant\":null") != std::string::npos);
  CHECK(outcome.text.find("\"host_operators\":[\"aten.svd\",\"aten.qr\"]") != std::string::npos);
}

TEST(damaged_states_are_refused) {
  const auto refused = [](const StateOptions& options, const char* words) {
    const Outcome outcome = describe(state_program(options));
    if (outcome.status != LAPILLI_INVALID_FILE || outcome.text.find(words) == std::string::npos) {
      std::fprintf(stderr, "%s\n", outcome.text.c_str());
      CHECK(false);
    }
  };
  refused({.constant = 1}, "begins as constant 1 of 1");
  refused({.constant = -2}, "begins as constant -2");
  refused({.size = 5}, "another dtype or shape than its initial value");
  refused({.second = "total"}, "two states of the name");
  refused({.second = ""}, "it is empty");
  refused({.load = true}, "may not read");
}

TEST(kernels_say_their_format) {
  CHECK(describe(sample_program()).text.find("\"name\":\"add\",\"format\":\"spirv\"") != std::string::npos);
  for (const uint8_t format : {uint8_t{1}, uint8_t{255}}) {
    const Outcome refused = describe(sample_program({.format = format}));
    CHECK(refused.status == LAPILLI_INVALID_FILE);
    const std::string words =
        "kernel \"scale\" is in format " + std::to_string(format) + ", and this player knows 0 (spirv)";
    CHECK(refused.text.find(words) != std::string::npos);
  }
}

TEST(requirements_are_named) {
  const Outcome outcome = describe(sample_program({.subgroup_operations = 1u << 7 | 1u << 31 | 1u}));
  CHECK(outcome.text.find("\"subgroup_operations\":[\"basic\",\"quad\",\"operation 31\"]") != std::string::npos);
}

TEST(any_changed_byte_is_found) {
  const FileBytes file = sample_program();
  for (size_t i = 0; i < file.size(); ++i) {
    FileBytes changed = file;
    changed[i] ^= std::byte{0x10};
    CHECK(describe(changed).status == LAPILLI_INVALID_FILE);
  }
}

// Its checksum is computed while the structure is read, which fails sooner.
TEST(a_checksum_that_does_not_fit_explains_the_rest) {
  const FileBytes file = sample_program({.width = 1u << 19});
  CHECK(file.size() > 2u << 20 && describe(file).status == LAPILLI_OK);
  for (const size_t at : {size_t{70}, size_t{100}, file.size() / 2, file.size() - 1}) {
    FileBytes changed = file;
    changed[at] ^= std::byte{0xff};
    const Outcome outcome = describe(changed);
    CHECK(outcome.status == LAPILLI_INVALID_FILE &&
          outcome.text.find("its checksum does not fit") != std::string::npos);
  }
}

TEST(any_truncation_is_found) {
  const FileBytes file = sample_program();
  for (size_t size = 1; size < file.size(); size += 13) {
    FileBytes shorter(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
    CHECK(describe(shorter).status == LAPILLI_INVALID_FILE);
    repair_checksum(shorter);
    CHECK(describe(shorter).status == LAPILLI_INVALID_FILE);
  }
}

TEST(two_thousand_mutations_do_no_harm) {
  std::mt19937 random(20261121);
  const FileBytes samples[] = {sample_program(), sample_program({.texel = true, .impossible_first = true}),
                               state_program({.host_operators = {"aten.svd"}})};
  int passed = 0;
  for (int i = 0; i < 2000; ++i) {
    FileBytes file = samples[random() % 3];
    mutate(file, random);
    if (i % 2 == 0)
      repair_checksum(file);
    const Outcome outcome = describe(file);
    CHECK(expected(outcome.status));
    CHECK(outcome.status == LAPILLI_OK || !outcome.text.empty());
    if (outcome.status != LAPILLI_OK)
      continue;
    ++passed;
    for (const int64_t batch : {int64_t{3}, int64_t{0}, int64_t{1} << 62, int64_t{-1}})
      CHECK(expected(plan(file, batch)));
  }
  std::printf("     %d of 2000 mutated files were still valid\n", passed);
}

// Mutations of the structure alone reach deeper, since most of a file is code and constants.
TEST(mutations_of_the_structure_do_no_harm) {
  std::mt19937 random(7);
  const FileBytes samples[] = {sample_program({.impossible_first = true}), state_program()};
  for (int i = 0; i < 6000; ++i) {
    FileBytes file = samples[i % 3 / 2];
    uint64_t structure = 0;
    std::memcpy(&structure, file.data() + 24, sizeof structure);
    for (uint32_t j = 0; j < 1 + random() % 3; ++j)
      file[64 + random() % structure] = static_cast<std::byte>(random());
    repair_checksum(file);
    const Outcome outcome = describe(file);
    CHECK(expected(outcome.status));
    if (outcome.status == LAPILLI_OK)
      for (const int64_t batch : {int64_t{3}, int64_t{1} << 62})
        CHECK(expected(plan(file, batch)));
  }
}

TEST(other_versions_and_other_files_are_named) {
  for (const std::byte version : {std::byte{1}, std::byte{3}}) {
    FileBytes file = sample_program();
    file[8] = version;
    repair_checksum(file);
    CHECK(describe(file).text.find("has format version " + std::to_string(std::to_integer<int>(version))) !=
          std::string::npos);
  }
  FileBytes other(1000, std::byte{'x'});
  CHECK(describe(other).text.find("not a Lapilli program") != std::string::npos);
  CHECK(describe(FileBytes(3)).status == LAPILLI_INVALID_FILE);
  CHECK(lapilli_describe(nullptr, 0, 0, nullptr, nullptr) == LAPILLI_INVALID_ARGUMENT);
}

TEST(unaligned_memory_is_read) {
  const FileBytes file = sample_program();
  FileBytes shifted(file.size() + 1);
  std::copy(file.begin(), file.end(), shifted.begin() + 1);
  char* json = nullptr;
  CHECK(lapilli_describe(shifted.data() + 1, file.size(), 0, nullptr, &json) == LAPILLI_OK);
  lapilli_free(json);
}

// FlatBuffers verifies that a list begins at a multiple of 4; its items want one of 8.
TEST(lists_that_are_not_aligned_are_refused) {
  ProgramBuilder builder;
  MethodBuilder m;
  m.method.plans.push_back(std::make_unique<schema::PlanT>());
  builder.program.methods.push_back(std::make_unique<schema::MethodT>(m.method));
  const FileBytes file = builder.finish();
  CHECK(describe(file).status == LAPILLI_OK);
  size_t refused = 0;
  for (const uint32_t by : {4u, 8u}) {
    FileBytes moved(file.begin(), file.begin() + 72); // with the root's offset and the identifier
    moved.insert(moved.end(), by, std::byte{0});
    uint64_t structure = 0;
    uint32_t root = 0;
    std::memcpy(&structure, file.data() + 24, 8);
    std::memcpy(&root, file.data() + 64, 4);
    moved.insert(moved.end(), file.begin() + 72, file.begin() + 64 + static_cast<ptrdiff_t>(structure));
    root += by;
    structure += by;
    const uint64_t data = (64 + structure + 63) / 64 * 64, none = 0;
    moved.resize(data);
    std::memcpy(moved.data() + 64, &root, 4);
    std::memcpy(moved.data() + 24, &structure, 8);
    std::memcpy(moved.data() + 32, &data, 8);
    std::memcpy(moved.data() + 40, &none, 8);
    repair_checksum(moved);
    const Outcome outcome = describe(moved);
    refused += outcome.status == LAPILLI_INVALID_FILE && outcome.text.find("not aligned") != std::string::npos;
  }
  CHECK(refused == 1);
}

TEST(limits_are_kept) {
  const FileBytes file = sample_program();
  const auto with = [&](uint64_t lapilli_limits::* field, uint64_t value) {
    lapilli_limits limits{};
    limits.struct_size = sizeof limits;
    limits.*field = value;
    char* json = nullptr;
    const lapilli_status status = lapilli_describe(file.data(), file.size(), 0, &limits, &json);
    lapilli_free(json);
    return status;
  };
  for (const auto field : {&lapilli_limits::structure_bytes, &lapilli_limits::code_bytes, &lapilli_limits::entries,
                           &lapilli_limits::expressions, &lapilli_limits::description_bytes}) {
    CHECK(with(field, 1) == LAPILLI_INVALID_FILE);
    CHECK(with(field, UINT64_MAX) == LAPILLI_OK);
    CHECK(with(field, 0) == LAPILLI_OK); // the default
  }
  lapilli_limits old{}; // of a caller that knows the first limit only
  old.struct_size = 16;
  old.entries = 1;
  char* json = nullptr;
  CHECK(lapilli_describe(file.data(), file.size(), 0, &old, &json) == LAPILLI_OK);
  lapilli_free(json);
  old.struct_size = 0;
  CHECK(lapilli_describe(file.data(), file.size(), 0, &old, &json) == LAPILLI_INVALID_ARGUMENT);
}

TEST(programs_in_zip_archives) {
  const FileBytes program = sample_program(), other(200, std::byte{7});
  const std::string want = describe(program).text;
  for (const bool wide : {false, true}) {
    const FileBytes whole =
        zip_archive({{"m/data/0", other}, {"m/data/1", program}, {"m/data.pkl", FileBytes(3)}}, wide);
    CHECK(describe(whole).status == LAPILLI_OK && describe(whole).text == want);
    FileBytes commented = whole;
    commented[commented.size() - 2] = std::byte{9};
    commented.resize(commented.size() + 9);
    CHECK(describe(commented).text == want);
    CHECK(describe(zip_archive({{"m/data/0", other}}, wide)).text.find("without a Lapilli program") !=
          std::string::npos);
    CHECK(describe(zip_archive({{"m/data/0", program, 8}}, wide)).status == LAPILLI_INVALID_FILE); // compressed
    CHECK(describe(zip_archive({{"a", program}, {"b", program}}, wide)).text.find("several") != std::string::npos);
    CHECK(describe(zip_archive({}, wide)).status == LAPILLI_INVALID_FILE);
    FileBytes changed = whole; // the program's own checksum
    changed[changed.size() / 2] ^= std::byte{1};
    CHECK(describe(changed).status == LAPILLI_INVALID_FILE);
  }
}

TEST(damaged_zip_archives) { // every byte of the directory at its edges, and every length
  const FileBytes program = sample_program();
  const std::string want = describe(program).text;
  for (const bool wide : {false, true}) {
    const FileBytes whole = zip_archive({{"m/data/0", program}, {"m/data.pkl", FileBytes(70)}}, wide);
    size_t refused = 0, tried = 0;
    const auto attempt = [&](const FileBytes& file) {
      const Outcome outcome = describe(file);
      CHECK(outcome.status == LAPILLI_INVALID_FILE || (outcome.status == LAPILLI_OK && outcome.text == want));
      refused += outcome.status == LAPILLI_INVALID_FILE;
      ++tried;
    };
    const size_t start = whole.size() - (wide ? 330 : 170); // before the directory
    for (size_t at = 0; at < whole.size(); at = at == 110 ? start : at + 1)
      for (const int value : {0, 1, 0x7f, 0x80, 0xff}) {
        FileBytes file = whole;
        file[at] = static_cast<std::byte>(value);
        attempt(file);
      }
    for (size_t size = 1; size < whole.size(); size += size < 200 || size > start ? 1 : 997)
      attempt({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)});
    CHECK(refused > tried / 4 && refused < tried);
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
