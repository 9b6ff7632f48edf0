// Writes the sample program: make_sample FILE [WIDTH]

#include "samples.h"

#include <cstdlib>

int main(int argc, char** argv) {
  if (argc < 2)
    return EXIT_FAILURE;
  SampleOptions options;
  if (argc > 2)
    options.width = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
  write_file(argv[1], sample_program(options));
  return EXIT_SUCCESS;
}
