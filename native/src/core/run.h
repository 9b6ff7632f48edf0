// One run of a method: its memory, its recorded commands, and where its inputs and outputs lie.
#pragma once

#include "core/states.h"
#include "format/file_limits.h"

#include <memory>

namespace lapilli {
class Program;
}

struct lapilli_run {
  // The program stays as long as somebody holds a run of it. Null while the run waits to be used again.
  std::shared_ptr<lapilli::Program> program;
};

namespace lapilli {

// How inputs reach the kernels and outputs the host. Environment variables LAPILLI_INPUT_PATH and LAPILLI_OUTPUT_PATH
// override the choice for measurements.
enum class InputPath {
  bar,     // the host writes into device memory
  staging, // host memory, copied by the device
  direct,  // kernels read host memory
};
enum class OutputPath {
  direct,  // kernels write host memory, where none of them reads it
  staging, // device memory, copied to the host's by the device
};
struct Paths {
  InputPath input;
  OutputPath output;
};
Paths choose_paths(const hal::Capabilities& device);
const char* name_of(InputPath path);
const char* name_of(OutputPath path);

using Symbols = std::vector<int64_t>;

// What all runs of a method share.
struct Shared {
  hal::Device& device;
  const Method& method;
  const Plan& plan;
  std::span<const Kernel> kernels;
  const hal::Pipelines& pipelines;
  std::span<const Region> constants; // of the plan's buffers
  Paths paths;
  MemoryCounter& counter;
  const States& states;
  const Limits& limits;
};

// Where the plan's arena buffers lie within blocks of memory.
struct ArenaPlan {
  std::vector<uint32_t> buffers; // of the plan
  std::vector<Lifetime> lifetimes;
  MemoryPlan plan;
};
ArenaPlan plan_arena(const Shared& shared, const Values& values);

class Run : public lapilli_run {
public:
  Run(const Shared& shared, uint32_t method);

  const uint32_t method;

  // An input or output as the host sees it.
  struct Tensor {
    std::vector<int64_t> shape;
    uint64_t bytes = 0;
    std::byte* mapped = nullptr;
  };
  std::span<const Tensor> inputs() const { return inputs_; }
  std::span<const Tensor> outputs() const { return outputs_; }

  // Sizes buffers and records commands for these symbols, unless that is what is recorded already. Not while in flight.
  void prepare(std::span<const int64_t> symbols);
  bool prepared_for(std::span<const int64_t> symbols) const;

  void submit();
  bool wait(uint64_t timeout); // false: not finished within that time
  // Waits where it is in flight, without looking at the outputs. False: the device is lost.
  bool settle() noexcept;
  bool in_flight() const { return in_flight_; }

  // For profiling and verification; the inputs are in place, the commands are run and waited for.
  void profile(uint32_t repeat, std::span<uint64_t> nanoseconds, uint64_t& total);
  void read_buffer(uint32_t command, uint32_t buffer, std::span<std::byte> to);

  uint64_t arena_size() const { return arena_.size(); }
  uint64_t arena_planned() const { return arena_planned_; }
  uint64_t arena_sum() const { return arena_sum_; }
  uint64_t io_size() const;

private:
  void place_arena(const Values& values);
  void place_tensors(const Values& values);
  std::vector<Tensor> tensors(std::span<const TensorSpec> specs, const Values& values) const;
  std::vector<bool> read_buffers() const;
  void record_all();
  void widen(const Dispatch& command, const Kernel& kernel, ResolvedDispatch& resolved) const;
  void record_uploads(hal::Commands& commands);
  void record_downloads(hal::Commands& commands);
  void record_dispatches(hal::Commands& commands, size_t first, size_t last);
  void profile_by_timestamps(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples,
                             std::vector<uint64_t>& totals);
  void profile_by_clock(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples, std::vector<uint64_t>& totals);

  struct Copy {
    Region from;
    Region to;
  };

  const Shared& shared_;
  Symbols symbols_;
  bool prepared_ = false;
  std::atomic<bool> in_flight_{false};
  Blocks arena_, input_host_, input_device_, output_host_, output_device_;
  uint64_t arena_planned_ = 0, arena_sum_ = 0;
  std::vector<Region> regions_; // of the plan's buffers
  std::vector<Tensor> inputs_, outputs_;
  std::vector<Copy> uploads_, downloads_;
  bool direct_outputs_ = false;
  std::vector<ResolvedDispatch> resolved_;
  std::unique_ptr<hal::Commands> commands_;
};

} // namespace lapilli
