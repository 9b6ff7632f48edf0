#include "core/recorder.h"

namespace lapilli {

std::span<const Region> Recorder::bind(const Placed& placed, const Launch::Command& command) {
  const size_t count = command.dispatch->bindings.size();
  for (size_t i = 0; i < count; ++i)
    bindings_[i] = placed.launch.bindings[command.first_binding + i].in(placed.slots);
  return std::span(bindings_).first(count);
}

void Recorder::prepare(hal::Commands& commands, const Placed& placed, size_t first, size_t last) {
  first_ = first;
  sets_.assign(last - first, nullptr);
  for (size_t c = first; c < last; ++c) {
    const Launch::Command& command = placed.launch.commands[c];
    const hal::Pipeline& pipeline = placed.pipelines[command.dispatch->kernel];
    if (pipeline.uses_sets)
      sets_[c - first] = commands.prepare(pipeline, bind(placed, command));
  }
}

void Recorder::record(hal::Commands& commands, const Placed& placed, Barriers barriers) {
  for (size_t i = 0; i < sets_.size(); ++i) {
    const Launch::Command& command = placed.launch.commands[first_ + i];
    const hal::Pipeline& pipeline = placed.pipelines[command.dispatch->kernel];
    if (i > 0 && (command.barrier || barriers == Barriers::all))
      commands.barrier(hal::Stage::compute_write, hal::compute);
    const std::span<const Region> bindings = pipeline.uses_sets ? std::span<const Region>() : bind(placed, command);
    commands.dispatch(pipeline, sets_[i], bindings,
                      std::span(placed.launch.params).subspan(command.first_param, command.dispatch->params.size()),
                      command.groups);
  }
}

} // namespace lapilli
