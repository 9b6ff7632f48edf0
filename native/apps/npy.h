// Tensors in files: NumPy's .npy (versions 1 and 2, little endian, C order), and raw bytes.
#pragma once

#include "arguments.h"
#include "lapilli.hpp"

#include <fstream>
#include <iterator>

inline std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad())
    throw Usage{path + " cannot be read."};
  return bytes;
}

inline std::vector<std::string> read_lines(const std::string& path) {
  std::vector<std::string> lines = split(read_whole(path), '\n');
  if (!lines.empty() && lines.back().empty())
    lines.pop_back();
  return lines;
}

inline void read_raw(const std::string& path, const lapilli::Tensor& tensor) {
  const std::string bytes = read_whole(path);
  if (bytes.size() != tensor.nbytes())
    throw Usage{path + " has " + std::to_string(bytes.size()) + " bytes, and the input " + tensor.text() + " takes " +
                std::to_string(tensor.nbytes()) + ". --input_dims gives another shape."};
  const auto from = lapilli::Tensor::try_from_blob(static_cast<const void*>(bytes.data()), bytes.size(), tensor.shape(),
                                                   tensor.dtype());
  tensor.copy_from(from.value());
}

// By the names of NumPy: '<f4'. It has no bfloat16, which is written as '<u2'.
struct NpyType {
  const char* name;
  lapilli::DType dtype;
};
inline constexpr NpyType npy_types[] = {
    {"|b1", lapilli::DType::boolean}, {"|u1", lapilli::DType::uint8},    {"|i1", lapilli::DType::int8},
    {"<i2", lapilli::DType::int16},   {"<i4", lapilli::DType::int32},    {"<i8", lapilli::DType::int64},
    {"<f2", lapilli::DType::float16}, {"<u2", lapilli::DType::bfloat16}, {"<f4", lapilli::DType::float32},
    {"<f8", lapilli::DType::float64},
};

inline lapilli::Tensor read_npy(const std::string& path) {
  const std::string bytes = read_whole(path);
  const auto refuse = [&](const std::string& why) {
    throw Usage{path + " is no .npy file that can be read: " + why + "."};
  };
  if (bytes.size() < 12 || bytes.compare(0, 6, "\x93NUMPY") != 0)
    refuse("it does not begin as one");
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<unsigned char>(bytes[i])); };
  const bool wide = byte(6) > 1;
  const size_t begin = wide ? 12 : 10;
  const size_t length = wide ? byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24 : byte(8) | byte(9) << 8;
  if (length > bytes.size() - begin)
    refuse("it is cut off");
  const std::string header = bytes.substr(begin, length);
  const auto after = [&](const char* key) {
    const size_t at = header.find(key);
    if (at == std::string::npos)
      refuse("its header has no " + std::string(key));
    return header.substr(std::min(header.size(), header.find(':', at) + 1));
  };
  if (after("'fortran_order'").substr(0, 6).find("True") != std::string::npos)
    refuse("it is in Fortran's order. Save numpy.ascontiguousarray() of it");
  const std::string descr = after("'descr'");
  const NpyType* type = nullptr;
  for (const NpyType& known : npy_types)
    if (descr.substr(0, 8).find(known.name) != std::string::npos)
      type = &known;
  if (type == nullptr)
    refuse("its dtype is none of bool, uint8, int8 to int64, float16 to float64 in little endian");
  std::string sizes = after("'shape'");
  const size_t open = sizes.find('('), close = sizes.find(')');
  if (open == std::string::npos || close == std::string::npos || close < open)
    refuse("its header has no shape");
  lapilli::Shape shape;
  for (std::string size : split(sizes.substr(open + 1, close - open - 1), ',')) {
    size.erase(std::remove(size.begin(), size.end(), ' '), size.end());
    if (!size.empty())
      shape.push_back(Arguments::number_of(size, "A size in " + path, 0, INT64_MAX));
  }
  const auto tensor = lapilli::Tensor::empty(shape, type->dtype);
  if (bytes.size() - begin - length != tensor.nbytes())
    refuse("its data has " + std::to_string(bytes.size() - begin - length) + " bytes for a tensor " + tensor.text());
  const auto from = lapilli::Tensor::try_from_blob(static_cast<const void*>(bytes.data() + begin + length),
                                                   static_cast<size_t>(tensor.nbytes()), shape, type->dtype);
  tensor.copy_from(from.value());
  return tensor;
}

inline void write_npy(const std::string& path, const lapilli::Tensor& tensor) {
  std::string header;
  for (const NpyType& known : npy_types)
    if (known.dtype == tensor.dtype())
      header = "{'descr': '" + std::string(known.name) + "', 'fortran_order': False, 'shape': (";
  for (const int64_t size : tensor.shape())
    header += std::to_string(size) + ",";
  header += "), }";
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  const auto length = static_cast<uint16_t>(header.size());
  file << "\x93NUMPY" << '\x01' << '\0' << static_cast<char>(length & 0xff) << static_cast<char>(length >> 8) << header;
  const auto host = tensor.cpu();
  std::vector<char> bytes(static_cast<size_t>(host.nbytes()));
  lapilli::Tensor::try_from_blob(static_cast<void*>(bytes.data()), bytes.size(), host.shape(), host.dtype())
      .value()
      .copy_from(host);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file)
    throw Usage{path + " cannot be written."};
}
