// lapilli.hpp as C++17 without exceptions and without std::span: results instead, and no value where there is none.
#include "lapilli.hpp"

#include <cstdio>

static_assert(LAPILLI_EXCEPTIONS == 0 && __cplusplus < 202002L, "as the build asks for");

static int failures = 0;
static void check(bool holds, const char* what) {
  if (!holds) {
    ++failures;
    std::fprintf(stderr, "%s does not hold\n", what);
  }
}

int main(int argc, char** argv) {
  if (argc != 2)
    return 2;
  const auto program = lapilli::Program::try_load(argv[1]);
  check(program.has_value(), "the sample loads");
  if (!program)
    return std::fprintf(stderr, "%s\n", program.error().message.c_str()), 1;
  const std::vector<float> values{1, 2, 3, 4, 5, 6, 7};
  const std::vector<int64_t> shape{1, 7};
  const auto x = lapilli::Tensor::try_of<float>(values, shape);
  const auto y = program->try_forward({*x});
  const auto on_device = x->try_vulkan();
  const auto z = program->try_forward({*on_device});
  check(y.has_value() && z.has_value(), "it runs");
  const auto a = y->try_values<float>(), b = z->try_values<float>();
  check(a.has_value() && b.has_value() && *a == *b, "both are the same");
  check(a->size() == 7 && (*a)[6] == 2 * (7 + 3 * 6.0f) + 5, "the last number");

  // A value that is not there is empty, and says so in its turn.
  const auto none = lapilli::Program::try_load(std::string("/nonexistent.lap"));
  check(!none && none.status() == lapilli::Status::io_error, "no file");
  const auto nothing = none->try_forward({*x});
  check(!nothing && nothing.status() == lapilli::Status::invalid_argument, "no program");
  check(!nothing->try_cpu() && !nothing->try_span<float>() && !lapilli::Run().try_wait() &&
            !lapilli::Stream().try_flush(),
        "nothing of nothing");
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
