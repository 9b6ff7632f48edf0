// Programs and streams on a device without a driver, whose commands tests read.
#pragma once

#include "base/platform.h"
#include "check.h"
#include "core/stream.h"
#include "hal/null/device.h"
#include "samples.h"

#include <algorithm>
#include <cstring>
#include <random>

using Floats = std::vector<float>;
using Recorded = std::vector<lapilli::null::Command>;
using Kind = lapilli::null::Command::Kind;

// What the kernels of the samples do: with three bindings `add`, with two `scale`; the last one is written.
inline void compute(const lapilli::null::Command& command) {
  using lapilli::null::data_of;
  const uint32_t n = command.params[0], k = command.params[1];
  const float* x = data_of<float>(command.bindings.front());
  float* y = data_of<float>(command.bindings.back());
  if (command.bindings.size() == 3)
    for (uint32_t i = 0; i < n; ++i)
      y[i] = x[i] + data_of<float>(command.bindings[1])[i % k];
  else
    for (uint32_t i = 0; i < n; ++i)
      y[i] = x[i] * static_cast<float>(k);
}

inline std::shared_ptr<lapilli::null::Device>
null_device(lapilli::hal::Capabilities of = lapilli::null::integrated_gpu()) {
  auto device = std::make_shared<lapilli::null::Device>(std::move(of));
  device->kernel = compute;
  return device;
}

inline std::shared_ptr<lapilli::Program> load(const FileBytes& file,
                                              const std::shared_ptr<lapilli::null::Device>& device,
                                              const lapilli_load_options& options = {}) {
  const lapilli::Source source{lapilli::Bytes(file)};
  return lapilli::Program::load(source, options, lapilli::nanoseconds_now(), [&] { return device; });
}

inline lapilli_tensor tensor(const Floats& values, std::vector<int64_t> shape) {
  lapilli_tensor result{};
  result.data = const_cast<float*>(values.data());
  result.size = 4 * values.size();
  result.rank = static_cast<uint32_t>(shape.size());
  result.dtype = static_cast<uint32_t>(schema::DType::float32);
  std::ranges::copy(shape, result.shape);
  return result;
}

// The first output of a run.
inline Floats run(lapilli::Program& program, uint32_t method, std::vector<lapilli_tensor> inputs,
                  std::vector<int64_t> sizes = {}) {
  lapilli::Run& submitted = program.submit(method, {inputs, sizes});
  CHECK(submitted.wait(lapilli::hal::no_timeout));
  const lapilli::Run::Tensor& output = submitted.outputs().front();
  const auto* first = reinterpret_cast<const float*>(output.mapped);
  Floats result(first, first + output.bytes / 4);
  program.release(submitted);
  return result;
}

// "b d0 c": a barrier, a dispatch of kernel 0, a copy; f: a fill, t: a timestamp.
inline std::string summary(const Recorded& commands) {
  std::string text;
  for (const lapilli::null::Command& command : commands) {
    text += text.empty() ? "" : " ";
    text += "bcfdt"[static_cast<size_t>(command.kind)];
    if (command.kind == Kind::dispatch)
      text += std::to_string(command.kernel);
  }
  return text;
}

inline Recorded only(const Recorded& commands, Kind kind) {
  Recorded result;
  std::ranges::copy_if(commands, std::back_inserter(result), [&](const auto& command) { return command.kind == kind; });
  return result;
}

// Whether no command depends on an earlier one of the list without a barrier between them.
inline bool is_ordered(const Recorded& commands) {
  struct Access {
    lapilli::hal::Region region;
    bool written;
  };
  std::vector<Access> since;
  for (const lapilli::null::Command& command : commands) {
    std::vector<Access> now;
    if (command.kind == Kind::barrier)
      since.clear();
    else if (command.kind == Kind::copy)
      now = {{command.from, false}, {command.to, true}};
    else if (command.kind == Kind::fill)
      now = {{command.to, true}};
    else
      for (const lapilli::hal::Region& region : command.bindings)
        now.push_back({region, &region == &command.bindings.back()});
    for (const Access& a : now)
      for (const Access& b : since)
        if ((a.written || b.written) && overlap(a.region, b.region))
          return false;
    since.insert(since.end(), now.begin(), now.end());
  }
  return true;
}

// What `f` throws, as text; empty where it throws nothing.
template <class F> std::string thrown(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

inline bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
