// A loaded program: its plans on one device, and the runs that are in use or wait to be used again.
#pragma once

#include "core/inputs.h"
#include "core/launch.h"
#include "core/requirements.h"
#include "format/container.h"

#include <functional>
#include <mutex>

namespace lapilli {

class Stream;

inline constexpr bool has_streams = LAPILLI_HAS_STREAMS != 0; // a build may do without

using OpenDevice = std::function<std::shared_ptr<hal::Device>()>;

enum class Choice {
  best,    // the first plan of each method that the device satisfies, or the one that the options name
  plainest // the last one
};
class Program;
// Asked once the best plans are chosen, before anything is made for them.
using Choose = std::function<Choice(const Program&)>;

class Program : public std::enable_shared_from_this<Program> {
public:
  // `file` is needed until this returns. `started`: when the load began; `open`: the device, once the file is read.
  static std::shared_ptr<Program> load(const Source& file, const lapilli_load_options& options, uint64_t started,
                                       const OpenDevice& open, const Choose& choose = {});
  ~Program();

  // Where compiled kernels and verdicts are kept; empty: nowhere.
  static std::string cache_folder_of(const lapilli_load_options& options);
  bool has_plainer() const { return plans_ != plainest_; }
  // What the caller is told of it, for good.
  void warn(std::string text) { warning_ = std::move(text); }
  const std::string& warning() const { return warning_; }

  const Model& model() const { return model_; }
  const Plan& plan(uint32_t method) const;
  const Method& method(uint32_t index) const;
  const hal::Device& device() const { return *device_; }
  const std::shared_ptr<hal::Device>& shared_device() const { return device_; }
  const States& states() const { return *states_; }
  const Limits& limits() const { return limits_; }
  const hal::Pipelines& pipelines() const { return *pipelines_; }

  // A run with its inputs in place, submitted.
  Run& submit(uint32_t method, const Given& given);
  void release(Run& run) noexcept;
  // For a run that took too long: it is used again when it is finished.
  void abandon(Run& run);
  void wait_for_all() noexcept;

  void profile(uint32_t method, const Given& given, uint32_t repeat, std::span<uint64_t> nanoseconds, uint64_t& total);
  void read_buffer(uint32_t method, const Given& given, uint32_t command, uint32_t buffer, std::span<std::byte> to);

  // The symbols that inputs show, over those that are given.
  void read_symbols(uint32_t method, std::span<const lapilli_tensor> inputs, std::span<int64_t> symbols) const;
  // The symbols of inputs of which all is checked but the data.
  SymbolValues check_shapes(uint32_t method, const Given& given) const;
  // The shapes and bytes of the outputs for these inputs, without running.
  void output_tensors(uint32_t method, const Given& given, std::span<lapilli_tensor> outputs);
  void output_tensors(uint32_t method, std::span<const int64_t> symbols, std::span<lapilli_tensor> outputs);

  // For a stream, which records what a launch says while it holds the lock.
  struct Launching {
    std::unique_lock<std::mutex> lock;
    const Launch& launch;
  };
  Launching launch(uint32_t method, std::span<const int64_t> symbols, Stream& stream);
  // Before `stream` is asked to run it: what uses the states on other streams comes first. The caller holds no lock.
  void leave_other_streams(const Stream& stream);
  // Whether the program is used for the first time by this batch of a stream's work.
  bool is_new_to(uint64_t batch) const { return batch_ != batch; }
  void is_known_to(uint64_t batch) { batch_ = batch; }
  // Work that was to change the states does not take place.
  void lose_states() noexcept { states_->lose(); }

  void reset();
  void read_state(uint32_t state, std::span<std::byte> to);
  void write_state(uint32_t state, Bytes from);

  std::string describe() const; // its file
  std::string info() const;
  lapilli_memory_info memory() const;
  const lapilli_load_times& load_times() const { return times_; }

private:
  static std::shared_ptr<Program> load(const Container& file, const lapilli_load_options& options, uint64_t started,
                                       const OpenDevice& open, const Choose& choose);
  Program(Model model, std::shared_ptr<hal::Device> device, const Limits& limits);
  void choose_plans(const char* wanted);
  void prepare(const Container& file, const lapilli_load_options& options);
  Run& acquire(uint32_t method, std::span<const int64_t> symbols);
  Run& acquire_with(uint32_t method, const Given& given);
  void discard_idle_runs();
  enum class Wanted { states, anything };
  std::unique_lock<std::mutex> alone(Wanted wanted = Wanted::states);
  void flush_streams(const Stream* but);
  void check_state(uint32_t state, uint64_t bytes) const;

  struct Rejected {
    std::string plan;
    Missing missing;
    bool parts; // it binds in parts what the plan before it binds whole
  };
  [[noreturn]] void refuse(const Method& method, const std::vector<Rejected>& rejected) const;

  const Limits limits_;
  MemoryCounter counter_;
  Model model_;
  std::shared_ptr<hal::Device> device_;
  std::vector<uint32_t> plans_;                 // the plan taken of each method
  std::vector<uint32_t> plainest_;              // the last one that the device satisfies
  std::vector<std::vector<Rejected>> rejected_; // better plans that the device cannot run
  std::unique_ptr<hal::Pipelines> pipelines_;
  std::unique_ptr<Constants> constants_;
  std::unique_ptr<States> states_;
  std::vector<Shared> shared_; // of each method
  std::mutex launching_;       // guards the next three
  std::vector<Launches> launches_;
  uint64_t batch_ = 0;                                                   // the last one that used the program
  std::vector<std::pair<const Stream*, std::weak_ptr<Stream>>> streams_; // that have used the states
  lapilli_load_times times_{};
  std::string warning_;

  std::mutex order_;         // held while something is submitted that uses the states
  mutable std::mutex mutex_; // guards the runs below
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<Run*> idle_, abandoned_;
  uint64_t last_arena_ = 0, last_arena_sum_ = 0;
};

} // namespace lapilli
