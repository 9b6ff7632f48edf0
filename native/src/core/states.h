// What a program keeps on the device between its runs.
#pragma once

#include "core/constants.h"

namespace lapilli {

// All runs of a program with states, and everything here, go through one queue: what is submitted first happens first.
// Callers keep others from submitting while they call.
class States {
public:
  // `plans[m]`: the plan taken of method m.
  States(hal::Device& device, const Model& model, std::span<const uint32_t> plans, MemoryCounter& counter);

  // Afterwards they have their initial values.
  void load(ConstantLoader& loader);

  bool empty() const { return current_.empty(); }
  hal::Order order() const { return empty() ? hal::Order::any : hal::Order::submitted; } // of runs
  const Region& region(uint32_t state) const { return current_[state]; }
  std::span<const Region> regions() const { return current_; }
  uint64_t size() const { return memory_.size() + initial_memory_.size(); }

  // Something that was to change them did not take place, or changed them half: they hold anything until they are reset.
  void lose() noexcept { lost_ = true; }
  void need_all() const; // throws where they are lost

  void reset();
  void read(uint32_t state, std::span<std::byte> to);
  void write(uint32_t state, Bytes from);

  // Does something that may change states, and gives them back what they held.
  template <class F> void preserve(F&& f) {
    if (empty())
      return f();
    const GpuBuffer kept = save();
    try {
      f();
    } catch (...) {
      restore(kept);
      throw;
    }
    restore(kept);
  }

private:
  GpuBuffer save();
  void restore(const GpuBuffer& kept);
  template <class F> void run(F&& record); // commands that copy, after all that was submitted; waits

  hal::Device& device_;
  const Model& model_;
  MemoryCounter& counter_;
  PlannedMemory memory_, initial_memory_;
  std::vector<Region> current_; // of every state
  std::vector<Region> initial_; // size 0: zeros
  std::unique_ptr<hal::Commands> commands_;
  std::atomic<bool> lost_{false};
};

} // namespace lapilli
