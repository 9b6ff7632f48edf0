// Programs on a device for tests, with the validation layer where it is installed.
#pragma once

#include "check.h"
#include "lapilli.h"
#include "samples.h"

#include <cstdlib>
#include <filesystem>
#include <random>

inline bool with_validation = false;

// A loaded program that is destroyed at the end of the scope.
class Program {
public:
  explicit Program(const FileBytes& file, lapilli_load_options options = {}) {
    options.validation = with_validation ? 1 : 0;
    status = lapilli_load_memory(file.data(), file.size(), &options, &handle);
    if (status != LAPILLI_OK)
      message = lapilli_last_error();
  }
  ~Program() { lapilli_destroy(handle); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void destroy() {
    lapilli_destroy(handle);
    handle = nullptr;
  }
  std::string info() const {
    char* json = nullptr;
    CHECK(lapilli_program_info(handle, &json) == LAPILLI_OK);
    std::string text = json != nullptr ? json : "";
    lapilli_free(json);
    return text;
  }

  lapilli_program* handle = nullptr;
  lapilli_status status = LAPILLI_INTERNAL;
  std::string message;
};

inline std::vector<float> random_values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values)
    value = static_cast<float>(random() % 1000) / 8.0f;
  return values;
}

// Sets a variable of the environment for a scope.
class Environment {
public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

private:
  const char* name_;
};

// Before the tests: whether the layer is there.
inline void try_validation() {
  if (const char* path = std::getenv("LAPILLI_VALIDATION_LOG"))
    std::filesystem::remove(path);
  const FileBytes file = sample_program();
  lapilli_load_options options{};
  options.validation = 1;
  lapilli_program* program = nullptr;
  with_validation = lapilli_load_memory(file.data(), file.size(), &options, &program) == LAPILLI_OK;
  lapilli_destroy(program);
  if (!with_validation)
    std::printf("     without validation: %s\n", lapilli_last_error());
}

// The last test: nothing was reported.
inline bool nothing_was_reported() {
  const char* path = std::getenv("LAPILLI_VALIDATION_LOG");
  return !with_validation || path == nullptr || read_file(path).empty();
}
