// Commands that are submitted together, and what must live until the device has finished them.
#pragma once

#include "core/memory.h"

namespace lapilli {

class Program;

class Batch {
public:
  Batch(hal::Device& device, hal::Order order);

  void begin(); // what is recorded comes after all that was submitted to the queue before
  // Nothing can be recorded after this, and what was recorded waits to be submitted; `readers`: what may access what it has
  // written, beside later batches. Where it throws, what was recorded is lost.
  void end(hal::Stage readers);
  bool ended() const { return ended_; }
  void submit(); // once it is ended; where it throws OUT_OF_MEMORY, it can be called again
  // False: not finished within that time. Afterwards nothing is kept alive any more.
  bool wait(uint64_t timeout);

  hal::Commands& commands() { return *commands_; }
  uint64_t id() const { return id_; } // of what is recorded now; each batch of the process has a higher one

  // Before commands that read the first `reads` of these regions and write the others: a barrier where one of them depends on
  // what was accessed since the last barrier. Once it returns, what copy() and fill() do cannot fail.
  void wait_for(std::span<const Region> regions, size_t reads);
  void copy(const Region& from, const Region& to);
  void fill(const Region& to, uint32_t word);
  // Commands that were recorded by commands(), and about the bytes that the device could move meanwhile.
  void count(size_t commands, uint64_t work);
  uint64_t recorded() const { return recorded_; }
  uint64_t work() const { return work_; }

  void keep(std::shared_ptr<Program> program) { programs_.push_back(std::move(program)); }
  std::span<const std::shared_ptr<Program>> programs() const { return programs_; }

private:
  bool conflicts(const Region& region, bool writes) const;

  struct Access {
    Region region;
    bool written;
  };
  std::unique_ptr<hal::Commands> commands_;
  uint64_t id_ = 0;
  bool ended_ = false;
  std::vector<Access> accesses_; // since the last barrier
  uint64_t recorded_ = 0, work_ = 0;
  std::vector<std::shared_ptr<Program>> programs_;
};

} // namespace lapilli
