#include "core/first_run.h"

#include "base/error.h"
#include "base/halves.h"
#include "core/verdicts.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>

namespace lapilli {

namespace {

constexpr int runs = 3;      // faults that come and go, as missing barriers do, seldom spare three
constexpr int64_t open = 33; // what dynamic sizes are, if their bounds allow: more than a tile of many kernels, and odd
// Relative errors up to which results are the same. Rounding is a hundred times less in float32, and halves have 11 bits.
constexpr double exact = 1e-3, half = 5e-2;

// -- numbers of every dtype

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): the same numbers on every machine.
class Random {
public:
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // Around zero, of variance 1 and at most 3.46: a sum of four. A multiple of 1/64, which all floats can store.
  float number() {
    double sum = 0;
    const uint64_t bits = next();
    for (int i = 0; i < 64; i += 16)
      sum += static_cast<double>(bits >> i & 0xffff) / 32767.5 - 1;
    constexpr double scale = 64 * 0.8660254037844386; // of a sum whose variance is 4/3
    return static_cast<float>(std::round(sum * scale) / 64);
  }

private:
  uint64_t state_ = 0;
};

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

double from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const uint32_t normal = (bits & 0x7fffu) << 13;
  double value = exponent == 31 ? (mantissa != 0 ? NAN : HUGE_VAL)
                 : exponent > 0 ? std::bit_cast<float>(normal + (112u << 23))
                                : mantissa * 0x1p-24;
  return (bits & 0x8000) != 0 ? -value : value;
}

template <class T> void put(std::byte* to, T value) { std::memcpy(to, &value, sizeof value); }
template <class T> T get(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

bool is_float(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

// Floats around zero; integers 0 and 1, which are indices of nearly everything. On little-endian machines, as all of the player.
void put_random(Random& random, DType dtype, std::byte* to) {
  switch (dtype) {
  case DType::float16:
    return put(to, half_of(random.number()));
  case DType::bfloat16:
    return put(to, static_cast<uint16_t>(bits_of(random.number()) >> 16));
  case DType::float32:
    return put(to, random.number());
  case DType::float64:
    return put(to, static_cast<double>(random.number()));
  default:
    *to = static_cast<std::byte>(random.next() >> 63); // the other bytes are zero
  }
}

double value_at(DType dtype, const std::byte* from) {
  switch (dtype) {
  case DType::float16:
    return from_half(get<uint16_t>(from));
  case DType::bfloat16:
    return std::bit_cast<float>(static_cast<uint32_t>(get<uint16_t>(from)) << 16);
  case DType::float64:
    return get<double>(from);
  default:
    return get<float>(from);
  }
}

// -- inputs and results

using Memory = std::vector<std::byte>;

struct Inputs {
  std::vector<Memory> memory;
  std::vector<lapilli_tensor> tensors;
};

// Nothing for a method with sizes that no input shows, or that are computed from others and cannot be had.
std::optional<Inputs> inputs_of(const Method& method) {
  std::vector<int64_t> symbols;
  for (const Symbol& symbol : method.symbols) {
    if (symbol.given)
      return std::nullopt;
    symbols.push_back(std::max(symbol.min, symbol.max < 0 ? open : std::min(open, symbol.max)));
  }
  const Values values(method.exprs, symbols);
  Random random;
  Inputs inputs;
  for (const TensorSpec& spec : method.inputs) {
    lapilli_tensor& tensor = inputs.tensors.emplace_back();
    tensor.rank = static_cast<uint32_t>(spec.shape.size());
    tensor.dtype = static_cast<uint32_t>(spec.dtype);
    for (size_t axis = 0; axis < spec.shape.size(); ++axis)
      tensor.shape[axis] = values[spec.shape[axis]];
    if (!tensor_bytes(std::span(tensor.shape).first(tensor.rank), spec.dtype, tensor.size))
      return std::nullopt;
    Memory& memory = inputs.memory.emplace_back(static_cast<size_t>(tensor.size));
    for (size_t i = 0; i < memory.size(); i += size_of(spec.dtype))
      put_random(random, spec.dtype, memory.data() + i);
    tensor.data = memory.data();
  }
  return inputs;
}

using Outputs = std::vector<Memory>;
using Results = std::vector<std::optional<Outputs>>; // by method; nothing for those that do not run on these inputs

// Of one method, with states as they are.
Outputs outputs_of(Program& program, uint32_t method, const Inputs& inputs) {
  Run& run = program.submit(method, {inputs.tensors});
  if (const uint64_t most = program.limits().run_nanoseconds; !run.wait(most)) {
    program.abandon(run);
    fail(LAPILLI_TIMEOUT, "The first-run check is not finished after ", most / 1'000'000, " ms (run_nanoseconds).");
  }
  Outputs outputs;
  for (const Run::Tensor& output : run.outputs())
    outputs.emplace_back(output.mapped, output.mapped + output.bytes);
  program.release(run);
  return outputs;
}

Results run_once(Program& program, const std::vector<std::optional<Inputs>>& inputs) {
  program.reset();
  Results results(inputs.size());
  for (uint32_t m = 0; m < inputs.size(); ++m)
    if (inputs[m])
      try {
        results[m] = outputs_of(program, m, *inputs[m]);
      } catch (const Error& error) {
        if (error.status != LAPILLI_INVALID_ARGUMENT && error.status != LAPILLI_INVALID_FILE)
          throw; // those are sizes that do not go together
      }
  return results;
}

// Nothing where they change from run to run.
std::optional<Results> results_of(Program& program, const std::vector<std::optional<Inputs>>& inputs) {
  Results first = run_once(program, inputs);
  bool same = true;
  for (int i = 1; i < runs && same; ++i)
    same = run_once(program, inputs) == first;
  program.reset(); // what its first caller finds
  if (!same)
    return std::nullopt;
  return first;
}

// The relative error (norm) of floats; infinite where NaN or infinities are elsewhere.
double error_of(DType dtype, const Memory& found, const Memory& wanted) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); i += size_of(dtype)) {
    const double a = value_at(dtype, found.data() + i), b = value_at(dtype, wanted.data() + i);
    if (std::isfinite(a) && std::isfinite(b)) {
      difference += (a - b) * (a - b);
      norm += b * b;
    } else if (std::isnan(a) ? !std::isnan(b) : a != b)
      return HUGE_VAL;
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

// The part of integers that differ.
double mismatch_of(DType dtype, const Memory& found, const Memory& wanted) {
  size_t different = 0;
  for (size_t i = 0; i < wanted.size(); i += size_of(dtype))
    different += std::memcmp(found.data() + i, wanted.data() + i, size_of(dtype)) != 0 ? 1 : 0;
  return static_cast<double>(different * size_of(dtype)) / static_cast<double>(std::max<size_t>(wanted.size(), 1));
}

// The worst of a method's floats; integers count where there are none, since they follow from floats that differ by rounding.
double difference_of(const Method& method, const Outputs& found, const Outputs& wanted) {
  double floats = 0, integers = 0;
  bool any = false;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const DType dtype = method.outputs[i].dtype;
    if (found[i].size() != wanted[i].size())
      return HUGE_VAL;
    any = any || is_float(dtype);
    double& worst = is_float(dtype) ? floats : integers;
    worst = std::max(worst,
                     is_float(dtype) ? error_of(dtype, found[i], wanted[i]) : mismatch_of(dtype, found[i], wanted[i]));
  }
  return any ? floats : integers;
}

double bound_of(const Plan& plan) {
  constexpr auto halves = static_cast<uint64_t>(Feature::storage_16bit) | static_cast<uint64_t>(Feature::float16);
  return (plan.requirements.features & halves) != 0 ? half : exact;
}

// "0.02", "3e+05": one digit.
std::string one_digit(double number) {
  if (!std::isfinite(number))
    return "infinity";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1g", number);
  return text.data();
}

// -- the verdict

constexpr const char* advice = " Update the driver. LAPILLI_DEVICE chooses another device.";

Verdict judge(const Model& model, const std::string& device, const std::vector<const Plan*>& taken,
              const std::vector<const Plan*>& plain, const std::optional<Results>& found,
              const std::optional<Results>& wanted, bool chosen) {
  const char* unstable = " computes something else whenever this program runs, so its results cannot be trusted.";
  if (!wanted)
    return {Finding::refused, cat(device, unstable, advice)};
  std::string wrong;
  size_t where = 0;
  if (!found)
    wrong = "something else in each run";
  else
    for (size_t m = 0; m < model.methods.size() && wrong.empty(); ++m) {
      if (!(*found)[m] || !(*wanted)[m])
        continue;
      const double error = difference_of(model.methods[m], *(*found)[m], *(*wanted)[m]);
      if (error <= bound_of(*taken[m]))
        continue;
      wrong = cat("wrong, with a relative error of ", one_digit(error), ",");
      where = m;
    }
  if (wrong.empty())
    return {};
  const std::string text = cat(device, " computes ", wrong, " by the plan ", taken[where]->name, " of this program");
  if (chosen)
    return {Finding::refused, cat(text, ", which was asked for by name: leave the name out.", advice)};
  return {Finding::plain, cat(text, ": the slower plan ", plain[where]->name, " is used instead.", advice)};
}

std::vector<const Plan*> plans_of(const Program& program) {
  std::vector<const Plan*> plans;
  for (uint32_t m = 0; m < program.model().methods.size(); ++m)
    plans.push_back(&program.plan(m));
  return plans;
}

} // namespace

std::shared_ptr<Program> load_checked(const Source& file, const lapilli_load_options& options, uint64_t started,
                                      const OpenDevice& open_device) {
  std::optional<VerdictFile> kept;
  std::optional<Verdict> verdict;
  std::shared_ptr<hal::Device> device;
  const auto load = [&](Choice choice) {
    return Program::load(file, options, started, device ? [&] { return device; } : open_device,
                         [=](const Program&) { return choice; });
  };
  const auto follow = [&] {
    if (verdict->finding == Finding::refused)
      fail(LAPILLI_NO_DEVICE, verdict->why);
    return verdict->finding == Finding::plain ? Choice::plainest : Choice::best;
  };
  std::shared_ptr<Program> program = Program::load(file, options, started, open_device, [&](const Program& chosen) {
    kept.emplace(Program::cache_folder_of(options), chosen, options.plan != nullptr);
    verdict = kept->read();
    return verdict ? follow() : Choice::best;
  });
  if (!verdict) {
    device = program->shared_device();
    const std::string name = cat(device->capabilities.name, " (", device->capabilities.driver, ")");
    std::vector<std::optional<Inputs>> inputs;
    for (const Method& method : program->model().methods)
      inputs.push_back(inputs_of(method));
    const std::optional<Results> found = results_of(*program, inputs);
    if (!program->has_plainer()) {
      verdict = found ? Verdict{} : judge(program->model(), name, {}, {}, found, found, false);
    } else {
      std::vector<Plan> taken; // what is said of them; their memory goes before the other program's comes
      for (const Plan* plan : plans_of(*program))
        taken.push_back({plan->name, plan->requirements, {}, {}, {}});
      program.reset();
      program = load(Choice::plainest);
      const std::optional<Results> wanted = results_of(*program, inputs);
      std::vector<const Plan*> pointers;
      for (const Plan& plan : taken)
        pointers.push_back(&plan);
      verdict = judge(program->model(), name, pointers, plans_of(*program), found, wanted, options.plan != nullptr);
      if (verdict->finding == Finding::right) {
        program.reset();
        program = load(Choice::best);
      }
    }
    kept->write(*verdict);
    follow();
  }
  program->warn(verdict->why);
  return program;
}

} // namespace lapilli
