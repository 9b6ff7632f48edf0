// One run of a method: a launch in memory of its own, recorded once and submitted again and again.
#pragma once

#include "core/recorder.h"

#include <memory>
#include <optional>

namespace lapilli {
class Program;
}

struct lapilli_run {
  // The program stays as long as somebody holds a run of it. Null while the run waits to be used again.
  std::shared_ptr<lapilli::Program> program;
};

namespace lapilli {

class Run : public lapilli_run {
public:
  Run(const Shared& shared, uint32_t method);

  const uint32_t method;

  // An input or output as the host sees it.
  struct Tensor {
    std::span<const int64_t> shape;
    uint64_t bytes = 0; // as the host sees it
    std::byte* mapped = nullptr;
    bool in_halves = false; // floats of the host lie there rounded
  };
  std::span<const Tensor> inputs() const { return inputs_; }
  void set_input(size_t index, const void* data);
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

  uint64_t arena_planned() const { return launch_->arena_total; }
  uint64_t arena_sum() const { return launch_->arena_sum; }
  uint64_t io_size() const { return io_size_; } // also while another thread prepares it

private:
  void place_arena();
  void place_tensors();
  bool is_copied(size_t output) const;
  bool has_no_work(size_t command) const { return launch_->at(command) == launch_->at(command + 1); } // of the plan
  void record_all();
  void record_uploads(hal::Commands& commands);
  void record_downloads(hal::Commands& commands);
  void record_dispatches(hal::Commands& commands, size_t first, size_t last); // of the plan
  void profile_by_timestamps(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples,
                             std::vector<uint64_t>& totals);
  void profile_by_clock(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples, std::vector<uint64_t>& totals);

  struct Copy {
    Region from;
    Region to;
  };

  const Shared& shared_;
  Symbols symbols_;
  std::optional<Launch> launch_;
  bool prepared_ = false; // the launch is recorded
  std::atomic<bool> in_flight_{false};
  std::atomic<uint64_t> io_size_{0}; // bytes of inputs and outputs
  PlannedMemory arena_, input_host_, input_device_, output_host_, output_device_;
  std::vector<Region> slots_;
  std::vector<Tensor> inputs_, outputs_;
  std::vector<Copy> uploads_, downloads_;
  bool direct_outputs_ = false;
  Recorder recorder_;
  std::unique_ptr<hal::Commands> commands_;
};

} // namespace lapilli
