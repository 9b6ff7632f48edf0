// Times a program as PyTorch's speed_benchmark_torch times a model: the same flags, and the same last line.

#include "inputs.h"

#include <chrono>
#include <iostream>

namespace {

using lapilli::Tensor;

const std::vector<Flag> flags{
    {"model", "FILE the program (.lap)"},
    {"input_dims", "SIZES of the inputs, as 1,3,224,224;1,10; without it those of the program"},
    {"input_type", "TYPES of the inputs, as float;int64; without it those of the program"},
    {"warmup", "N runs before the measurement", "0"},
    {"iter", "N runs that are measured", "10"},
    {"method", "NAME of the method; without it \"forward\", or the first"},
    {"device", "NAME or index of the device; without it $LAPILLI_DEVICE, or the best"},
    {"plan", "NAME of the plan; without it the first that the device satisfies"},
    {"verify", "first-run: check once for each file and driver that the device computes right"},
    {"resident", "keep inputs and outputs on the device: no copies are measured"},
    {"report", "print the least, the median and the 90th percentile, too"},
    {"print_output", "print the first values of the outputs"},
    {"vulkan", "accepted for compatibility: it is always on", "true"},
};

std::vector<Tensor> make_inputs(const Arguments& arguments, const lapilli::Program& program,
                                const std::string& method) {
  const std::vector<lapilli::Spec> specs = program.inputs(method);
  std::vector<lapilli::Shape> shapes;
  for (const lapilli::Spec& spec : specs)
    shapes.push_back(default_shape(spec));
  if (arguments.has("input_dims"))
    shapes = parse_dims(arguments.text("input_dims"));
  std::vector<lapilli::DType> types;
  if (arguments.has("input_type"))
    for (const std::string& type : split(arguments.text("input_type"), ';'))
      types.push_back(parse_type(type));
  else
    for (size_t i = 0; i < shapes.size(); ++i)
      types.push_back(i < specs.size() ? specs[i].dtype : lapilli::DType::float32);
  if (types.size() != shapes.size())
    throw Usage{"--input_dims has " + std::to_string(shapes.size()) + " inputs and --input_type " +
                std::to_string(types.size()) + ": both are lists with a semicolon between two inputs."};
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < shapes.size(); ++i) {
    inputs.push_back(Tensor::empty(shapes[i], types[i]));
    fill(inputs.back());
  }
  return inputs;
}

void print(const std::vector<Tensor>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::cout << "Output " << i << ": " << outputs[i].text();
    if (const Tensor host = outputs[i].cpu(); host.dtype() == lapilli::DType::float32) {
      const auto values = host.span<const float>();
      for (size_t j = 0; j < std::min<size_t>(values.size(), 8); ++j)
        std::cout << (j == 0 ? ": " : ", ") << values[j];
    }
    std::cout << std::endl;
  }
}

int bench(const Arguments& arguments) {
  if (!arguments.others.empty())
    throw Usage{"\"" + arguments.others.front() + "\" is no flag; the program is given by --model."};
  if (!arguments.has("model"))
    throw Usage{"--model is missing: the program to measure."};
  if (!arguments.is_on("vulkan"))
    throw Usage{
        "--vulkan is false, and Lapilli has nothing else. On a software driver (--device=llvmpipe) it runs on the "
        "processor."};
  const int64_t warmup = arguments.number("warmup", 0, 1'000'000'000),
                iter = arguments.number("iter", 1, 1'000'000'000);
  const auto program = load_program(arguments.text("model"), arguments);
  const std::string method = chosen_method(arguments, program);
  std::vector<Tensor> inputs = make_inputs(arguments, program, method);
  std::vector<Tensor> outputs =
      program.run(method, inputs); // says at once what does not fit, and makes the outputs' memory
  lapilli::Stream stream;
  if (arguments.is_on("resident")) {
    stream = program.stream();
    for (std::vector<Tensor>* tensors : {&inputs, &outputs})
      for (Tensor& tensor : *tensors)
        tensor = tensor.vulkan(stream);
  }
  const auto once = [&] {
    program.run_into(method, inputs, outputs);
    if (stream)
      stream.synchronize();
  };

  std::cout << "Starting benchmark." << std::endl;
  std::cout << "Running warmup runs." << std::endl;
  for (int64_t i = 0; i < warmup; ++i)
    once();
  std::cout << "Main runs." << std::endl;
  using Clock = std::chrono::steady_clock;
  std::vector<double> times; // microseconds
  const auto begin = Clock::now();
  auto last = begin;
  for (int64_t i = 0; i < iter; ++i) {
    once();
    const auto now = Clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(now - last).count());
    last = now;
  }
  const double total = std::chrono::duration<double, std::micro>(last - begin).count();
  if (arguments.is_on("report")) {
    std::sort(times.begin(), times.end());
    std::cout << "Device: " << program.device().name() << ". Least: " << times.front()
              << ". Median: " << times[times.size() / 2] << ". 90th percentile: " << times[(times.size() - 1) * 9 / 10]
              << "." << std::endl;
  }
  if (arguments.is_on("print_output"))
    print(outputs);
  std::cout << "Main run finished. Microseconds per iter: " << total / static_cast<double>(iter)
            << ". Iters per second: " << 1e6 * static_cast<double>(iter) / total << std::endl;
  return EXIT_SUCCESS;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return bench(Arguments(argc, argv, "lapilli-bench --model=FILE [FLAGS]: times a program.\n", flags));
  } catch (const Usage& usage) {
    std::cerr << "lapilli-bench: " << usage.message << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "lapilli-bench: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
