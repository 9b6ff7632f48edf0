// Runs a program once: inputs from files (.npy, or raw bytes), outputs as text or to .npy files.

#include "inputs.h"
#include "npy.h"

#include <iostream>

namespace {

using lapilli::DType;
using lapilli::Tensor;

const std::vector<Flag> flags{
    {"input", "FILE of an input: .npy, or its bytes as they are; once for each, in their order", "", true},
    {"input_dims", "SIZES of inputs from raw bytes, as 1,3,224,224;1,10; without it those of the program"},
    {"output", "FILE.npy for an output; once for each, in their order", "", true},
    {"method", "NAME of the method; without it \"forward\", or the first"},
    {"device", "NAME or index of the device; without it $LAPILLI_DEVICE, or the best"},
    {"plan", "NAME of the plan; without it the first that the device satisfies"},
    {"verify", "first-run: check once for each file and driver that the device computes right"},
    {"top", "N largest values of the first output, with their places", "0"},
    {"labels", "FILE with a name a line, for --top"},
    {"list", "print the methods with their inputs and outputs, and run nothing"},
    {"devices", "print the devices, and run nothing"},
};

std::string text_of(const std::vector<lapilli::Spec>& specs) {
  std::string text;
  for (const lapilli::Spec& spec : specs) {
    text += (text.empty() ? "" : ", ") + spec.name + " " + lapilli::name_of(spec.dtype) + " (";
    for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
      text += axis > 0 ? ", " : "";
      if (spec.shape[axis] >= 0)
        text += std::to_string(spec.shape[axis]);
      else if (spec.min[axis] < 0)
        text += "?";
      else
        text += std::to_string(spec.min[axis]) + ".." + (spec.max[axis] < 0 ? "" : std::to_string(spec.max[axis]));
    }
    text += ")";
  }
  return text.empty() ? "nothing" : text;
}

int list(const lapilli::Program& program) {
  for (const std::string& method : program.methods())
    std::cout << method << ": " << text_of(program.inputs(method)) << " -> " << text_of(program.outputs(method))
              << std::endl;
  return EXIT_SUCCESS;
}

int list_devices() {
  for (const lapilli::Device& device : lapilli::devices())
    std::cout << device.index() << ": " << device.name() << " (Vulkan " << device.api_version() << ", "
              << device.driver() << ")" << std::endl;
  return EXIT_SUCCESS;
}

bool is_npy(const std::string& path) { return path.size() > 4 && path.substr(path.size() - 4) == ".npy"; }

std::vector<Tensor> read_inputs(const Arguments& arguments, const std::vector<lapilli::Spec>& specs) {
  const std::vector<std::string>& files = arguments.all("input");
  if (!files.empty() && files.size() != specs.size())
    throw Usage{"The method takes " + std::to_string(specs.size()) + " inputs (" + text_of(specs) +
                "), and --input was given " + std::to_string(files.size()) + " times."};
  std::vector<lapilli::Shape> shapes;
  if (arguments.has("input_dims"))
    shapes = parse_dims(arguments.text("input_dims"));
  if (!shapes.empty() && shapes.size() != specs.size())
    throw Usage{"The method takes " + std::to_string(specs.size()) + " inputs (" + text_of(specs) +
                "), and --input_dims has " + std::to_string(shapes.size()) + "."};
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (i < files.size() && is_npy(files[i])) {
      inputs.push_back(read_npy(files[i]));
      continue;
    }
    inputs.push_back(Tensor::empty(shapes.empty() ? default_shape(specs[i]) : shapes[i], specs[i].dtype));
    if (i < files.size())
      read_raw(files[i], inputs.back());
    else
      fill(inputs.back());
  }
  return inputs;
}

void print_top(const Tensor& output, size_t count, const std::string& labels) {
  if (output.dtype() != DType::float32)
    throw Usage{"--top is for float32; the first output is " + output.text() + "."};
  const std::vector<std::string> names = labels.empty() ? std::vector<std::string>() : read_lines(labels);
  const auto values = output.span<const float>();
  std::vector<size_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  order.erase(std::remove_if(order.begin(), order.end(), [&](size_t i) { return values[i] != values[i]; }),
              order.end());
  count = std::min(count, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
                    [&](size_t a, size_t b) { return values[a] > values[b] || (values[a] == values[b] && a < b); });
  for (size_t i = 0; i < count; ++i)
    std::cout << i + 1 << ". " << (order[i] < names.size() ? names[order[i]] : "index " + std::to_string(order[i]))
              << ": " << values[order[i]] << std::endl;
}

template <class T> void print_values(const Tensor& output) {
  const auto values = output.span<const T>();
  for (size_t i = 0; i < std::min<size_t>(values.size(), 8); ++i) {
    std::cout << (i == 0 ? ": " : ", ");
    if constexpr (std::is_same_v<T, lapilli::Half> || std::is_same_v<T, lapilli::BFloat16>)
      std::cout << static_cast<float>(values[i]);
    else
      std::cout << +values[i];
  }
  std::cout << (values.size() > 8 ? ", ..." : "") << std::endl;
}

void print(const lapilli::Spec& spec, const Tensor& output) {
  std::cout << spec.name << " " << output.text();
  switch (output.dtype()) {
  case DType::boolean:
    return print_values<bool>(output);
  case DType::uint8:
    return print_values<uint8_t>(output);
  case DType::int8:
    return print_values<int8_t>(output);
  case DType::int16:
    return print_values<int16_t>(output);
  case DType::int32:
    return print_values<int32_t>(output);
  case DType::int64:
    return print_values<int64_t>(output);
  case DType::float16:
    return print_values<lapilli::Half>(output);
  case DType::bfloat16:
    return print_values<lapilli::BFloat16>(output);
  case DType::float32:
    return print_values<float>(output);
  case DType::float64:
    return print_values<double>(output);
  }
}

int run(const Arguments& arguments) {
  if (arguments.is_on("devices"))
    return list_devices();
  if (arguments.others.size() != 1)
    throw Usage{"One program is run; " + std::to_string(arguments.others.size()) + " were given. --help says how."};
  const int64_t top = arguments.number("top", 0, 1'000'000);
  const auto program = load_program(arguments.others.front(), arguments);
  if (arguments.is_on("list"))
    return list(program);
  const std::string method = chosen_method(arguments, program);
  const std::vector<Tensor> outputs = program.run(method, read_inputs(arguments, program.inputs(method)));
  const std::vector<std::string>& files = arguments.all("output");
  if (files.size() > outputs.size())
    throw Usage{"The method has " + std::to_string(outputs.size()) + " outputs, and --output was given " +
                std::to_string(files.size()) + " times."};
  for (size_t i = 0; i < files.size(); ++i)
    write_npy(files[i], outputs[i]);
  if (top > 0 && !outputs.empty())
    print_top(outputs.front(), static_cast<size_t>(top), arguments.text("labels"));
  else if (files.empty()) {
    const auto specs = program.outputs(method);
    for (size_t i = 0; i < outputs.size(); ++i)
      print(specs[i], outputs[i]);
  }
  return EXIT_SUCCESS;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(Arguments(
        argc, argv,
        "lapilli-run MODEL.lap [FLAGS]: runs a program once. Inputs without a file are random, and the same in "
        "every process.\n",
        flags));
  } catch (const Usage& usage) {
    std::cerr << "lapilli-run: " << usage.message << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "lapilli-run: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
