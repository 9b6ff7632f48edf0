// Writes what fuzzing begins with: small programs of every kind, damaged ones, and their kernels by themselves.

#include "kernels.h"
#include "samples.h"

#include <cstring>
#include <filesystem>
#include <random>

int main(int argc, char** argv) {
  if (argc != 2)
    return 1;
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder / "files");
  std::filesystem::create_directories(folder / "kernels");
  std::vector<FileBytes> files;
  files.push_back(sample_program());
  files.push_back(sample_program({.width = 64, .texel = true}));
  files.push_back(sample_program({.impossible_first = true, .factor = 2, .offset = 1}));
  files.push_back(sample_program({.format = 1}));
  files.push_back(sample_program({.subgroup_operations = 0x81}));
  files.push_back(state_program());
  files.push_back(checked_program());
  files.push_back(sum_program());
  std::mt19937 random(1);
  const size_t whole = files.size();
  for (size_t n = 0; n < 60; ++n) { // some words of each changed
    FileBytes file = files[n % whole];
    for (size_t k = 0; k < 1 + n % 3; ++k) {
      const size_t at = 64 + random() % (file.size() - 68) / 4 * 4;
      const uint32_t values[] = {0, 1, 0x7fffffff, 0xffffffff, static_cast<uint32_t>(random()), 1u << random() % 32};
      const uint32_t value = values[random() % 6];
      std::memcpy(file.data() + at, &value, sizeof value);
    }
    repair_checksum(file);
    files.push_back(std::move(file));
  }
  for (const bool wide : {false, true}) {
    files.push_back(zip_archive({{"m/data/0", sum_program()}, {"m/data.pkl", FileBytes(70)}}, wide));
    files.push_back(zip_archive({{"m/data.pkl", FileBytes(3)}}, wide));
  }
  for (size_t n = 0; n < files.size(); ++n)
    write_file((folder / "files" / ("program" + std::to_string(n) + ".lap")).string(), files[n]);
  size_t number = 0;
  const auto kernel = [&](std::span<const uint32_t> code) {
    for (size_t n = 0; n < 12; ++n) { // the first as it is
      std::vector<uint32_t> changed(code.begin(), code.end());
      if (n > 0)
        changed[5 + random() % (changed.size() - 5)] = static_cast<uint32_t>(n % 2 == 0 ? random() % 300 : random());
      write_file((folder / "kernels" / ("kernel" + std::to_string(number++) + ".spv")).string(),
                 std::as_bytes(std::span(changed)));
    }
  };
  kernel(kernels::add);
  kernel(kernels::scale);
  kernel(kernels::slow);
  kernel(kernels::scale_half);
  kernel(kernels::scale_texel);
}
