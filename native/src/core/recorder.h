// Recording the commands of a launch, its slots being placed: for streams, for runs that are recorded once, and for timing.
#pragma once

#include "core/launch.h"

namespace lapilli {

// A launch and where its slots lie.
struct Placed {
  const Launch& launch;
  const hal::Pipelines& pipelines;
  std::span<const Region> slots;
};

class Recorder {
public:
  // Does what can fail of commands first..last-1 of the launch, so that record() does not record half of them.
  void prepare(hal::Commands& commands, const Placed& placed, size_t first, size_t last);

  // Records them, once they are prepared, with the barriers that the plan asks for between them, or with all that there can be.
  enum class Barriers { planned, all };
  void record(hal::Commands& commands, const Placed& placed, Barriers barriers = Barriers::planned);

private:
  std::span<const Region> bind(const Placed& placed, const Launch::Command& command);

  size_t first_ = 0;
  std::vector<hal::Commands::Set> sets_; // of the commands from the first one on
  std::array<Region, max_bindings> bindings_;
};

} // namespace lapilli
