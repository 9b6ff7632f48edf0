// The C++ block of PyTorch's Vulkan tutorial, line by line: see docs/cpp.md.
//
//     tutorial MODEL.lap
#include <lapilli.hpp>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: tutorial MODEL.lap\n";
    return 2;
  }
  if (!lapilli::is_vulkan_available()) {
    std::cerr << "There is no Vulkan driver with a device.\n";
    return 1;
  }
  try {
    auto program = lapilli::Program::load(argv[1]);
    lapilli::Shape shape = program.inputs().at(0).shape;
    for (int64_t& size : shape)
      size = size < 0 ? 1 : size; // open sizes
    std::mt19937 generator;
    auto tensor = lapilli::rand(shape, generator);
    auto tensor_vulkan = tensor.vulkan();
    auto output_vulkan = program.forward({tensor_vulkan});
    auto output = output_vulkan.cpu();

    std::cout << program.device().name() << ": " << tensor.text() << " -> " << output.text() << "\n";
    const auto on_host = program.forward({tensor});
    return output.values<float>() == on_host.values<float>() ? 0 : 1; // the same from host tensors
  } catch (const lapilli::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
