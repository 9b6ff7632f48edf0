// The smallest test framework: TEST(name) { CHECK(...); } and a main that runs them all, or those named on the command
// line.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}
inline int failures = 0;

#define TEST(name)                                                               \
  static void name();                                                            \
  static const bool name##_known = (all_tests().push_back({#name, name}), true); \
  static void name()

#define CHECK(...)                                                                         \
  do {                                                                                     \
    if (!(__VA_ARGS__)) {                                                                  \
      ++failures;                                                                          \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #__VA_ARGS__); \
    }                                                                                      \
  } while (false)

inline int run_tests(int argc, char** argv) {
  size_t ran = 0;
  for (const Test& test : all_tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i)
      wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted)
      continue;
    const int before = failures;
    try {
      test.run();
    } catch (const std::exception& error) {
      ++failures;
      std::fprintf(stderr, "%s threw: %s\n", test.name, error.what());
    }
    ++ran;
    std::printf("%s %s\n", failures == before ? "ok  " : "FAIL", test.name);
    std::fflush(stdout);
  }
  std::printf("%zu tests, %d failures\n", ran, failures);
  return failures == 0 && ran > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
