// Inputs for a method: what the command line says of their shapes and types, filled with numbers.
#pragma once

#include "arguments.h"
#include "lapilli.hpp"

#include <iostream>
#include <optional>
#include <random>

// "1,3,224,224;1,10": a shape for each input.
inline std::vector<lapilli::Shape> parse_dims(const std::string& text) {
  std::vector<lapilli::Shape> shapes;
  for (const std::string& part : split(text, ';')) {
    lapilli::Shape& shape = shapes.emplace_back();
    if (!part.empty()) // a scalar
      for (const std::string& size : split(part, ','))
        shape.push_back(Arguments::number_of(size, "A size in --input_dims", 0, INT32_MAX));
  }
  return shapes;
}

// The names of PyTorch's benchmark (float, uint8_t, int64_t) and those of dtypes.
inline lapilli::DType parse_type(const std::string& text) {
  using lapilli::DType;
  if (text == "float")
    return DType::float32;
  if (text == "half")
    return DType::float16;
  if (text == "double")
    return DType::float64;
  std::string name = text;
  if (name.size() > 2 && name.substr(name.size() - 2) == "_t")
    name.resize(name.size() - 2);
  std::string names;
  for (uint32_t i = 0; i <= LAPILLI_FLOAT64; ++i) {
    if (name == lapilli::name_of(static_cast<DType>(i)))
      return static_cast<DType>(i);
    names += std::string(i > 0 ? ", " : "") + lapilli::name_of(static_cast<DType>(i));
  }
  throw Usage{"--input_type is float, half, double, or one of " + names + "; \"" + text + "\" was given."};
}

// Floats in 0 to 1, ones as integers: a place in any table. The same in every process.
inline void fill(const lapilli::Tensor& tensor) {
  using lapilli::DType;
  std::mt19937 generator;
  const auto next = [&] { return static_cast<float>(generator() >> 8) * (1.0f / 16777216.0f); };
  const auto each = [&](auto make) {
    using T = decltype(make());
    for (T& element : tensor.span<T>())
      element = make();
  };
  switch (tensor.dtype()) {
  case DType::float32:
    return each(next);
  case DType::float64:
    return each([&] { return static_cast<double>(next()); });
  case DType::float16:
    return each([&] { return lapilli::Half(next()); });
  case DType::bfloat16:
    return each([&] { return lapilli::BFloat16(next()); });
  case DType::boolean:
    return each([] { return true; });
  case DType::uint8:
    return each([] { return uint8_t{1}; });
  case DType::int8:
    return each([] { return int8_t{1}; });
  case DType::int16:
    return each([] { return int16_t{1}; });
  case DType::int32:
    return each([] { return int32_t{1}; });
  case DType::int64:
    return each([] { return int64_t{1}; });
  }
}

// A dynamic size gets its least value, and at least 1.
inline lapilli::Shape default_shape(const lapilli::Spec& spec) {
  lapilli::Shape shape = spec.shape;
  for (size_t axis = 0; axis < shape.size(); ++axis)
    if (shape[axis] < 0)
      shape[axis] = std::max<int64_t>(spec.min[axis], 1);
  return shape;
}

inline lapilli::Options load_options(const Arguments& arguments) {
  lapilli::Options options;
  options.device = arguments.text("device");
  options.plan = arguments.text("plan");
  if (arguments.has("verify")) {
    if (arguments.text("verify") != "first-run")
      throw Usage{"--verify is first-run; \"" + arguments.text("verify") + "\" was given."};
    options.first_run = true;
  }
  return options;
}

// A program by the flags; what its first-run check found goes to the errors.
inline lapilli::Program load_program(const std::string& path, const Arguments& arguments) {
  const auto program = lapilli::Program::load(path, load_options(arguments));
  if (const std::string warning = program.warning(); !warning.empty())
    std::cerr << "Warning: " << warning << std::endl;
  return program;
}

// The method of --method: "forward" or the first one unless it is given.
inline std::string chosen_method(const Arguments& arguments, const lapilli::Program& program) {
  if (arguments.has("method"))
    return arguments.text("method");
  const std::vector<std::string> methods = program.methods();
  return std::find(methods.begin(), methods.end(), "forward") != methods.end() ? "forward" : methods.at(0);
}
