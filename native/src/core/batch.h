// Commands that are submitted together, and what must live until the device has finished them.
#pragma once

#include "core/program.h"

namespace lapilli {

class Batch {
public:
  explicit Batch(hal::Device& device);

  void begin();
  // Nothing can be recorded after this, and what was recorded waits to be submitted. Where it throws, it is lost.
  void end();
  bool ended() const { return ended_; }
  void submit(); // once it is ended; where it throws OUT_OF_MEMORY, it can be called again
  // False: not finished within that time. Afterwards nothing is kept alive any more.
  bool wait(uint64_t timeout);

  hal::Commands& commands() { return *commands_; }
  uint64_t id() const { return id_; } // of what is recorded now; no two batches of the process have the same

  void keep(std::shared_ptr<Program> program) { programs_.push_back(std::move(program)); }
  std::span<const std::shared_ptr<Program>> programs() const { return programs_; }

  uint64_t staged = 0; // where the staging ring was when this was submitted

private:
  std::unique_ptr<hal::Commands> commands_;
  uint64_t id_ = 0;
  bool ended_ = false;
  std::vector<std::shared_ptr<Program>> programs_;
};

} // namespace lapilli
