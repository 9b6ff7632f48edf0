#include "core/batches.h"

#include "base/error.h"
#include "core/program.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr size_t most_in_flight = 32;
// A batch is submitted when it has so many commands, or does so much; sooner when the device has nothing else to do: then
// after so many, and twice as many each further time it is found idle, for the host is the slower one, and a submission
// takes it as long as some commands do.
constexpr uint64_t commands_of_a_batch = 128, commands_for_idle = 8;
constexpr uint64_t work_of_a_batch = uint64_t{256} << 20, work_for_idle = uint64_t{1} << 20;
constexpr uint32_t most_patience = 8;

} // namespace

Batches::Batches(hal::Device& device, hal::Stage readers)
    : device_(device), readers_(readers), batches_(most_in_flight) {}

Batches::~Batches() {
  try {
    wait_until_in_flight(0);
  } catch (...) { // the device is lost: nothing runs any more
  }
}

Batch& Batches::record() {
  if (recording_ && at(in_flight_).ended())
    submit(); // what could not be submitted when it was due
  if (!recording_) {
    retire_finished();
    wait_until_in_flight(most_in_flight - 1);
    std::unique_ptr<Batch>& next = batches_[(oldest_ + in_flight_) % batches_.size()];
    if (!next)
      next = std::make_unique<Batch>(device_, hal::Order::submitted);
    next->begin();
    recording_ = true;
    look_later();
  }
  return at(in_flight_);
}

void Batches::submit() {
  if (!recording_)
    return;
  Batch& last = at(in_flight_);
  if (!last.ended())
    try {
      last.end(readers_);
    } catch (...) { // what was recorded is nowhere else
      lost_ = true;
      drop();
      throw;
    }
  last.submit();
  recording_ = false;
  ++in_flight_;
}

void Batches::drop() noexcept {
  if (recording_)
    for (const auto& program : at(in_flight_).programs())
      program->lose_states();
  recording_ = false;
}

void Batches::submit_if_due() {
  if (!recording_)
    return;
  const Batch& last = at(in_flight_);
  bool due = last.recorded() >= commands_of_a_batch || last.work() >= work_of_a_batch;
  if (!due && last.recorded() < look_at_ && last.work() < look_at_work_)
    return;
  if (!due) {
    retire_finished();
    due = in_flight_ == 0;
    patience_ = due ? std::min(2 * patience_, most_patience)
                    : 1; // the host is ahead, and the next batch should be there when the device is ready
  }
  if (!due)
    return look_later();
  try {
    submit();
  } catch (const Error& error) {
    if (error.status != LAPILLI_OUT_OF_MEMORY || lost_)
      throw;
  } catch (const std::bad_alloc&) {
    if (lost_)
      throw;
  }
}

void Batches::look_later() {
  const Batch& last = at(in_flight_);
  look_at_ = last.recorded() + commands_for_idle * patience_;
  look_at_work_ = last.work() + work_for_idle * patience_;
}

// False when the oldest batch in flight is not finished within `timeout` nanoseconds.
bool Batches::retire_oldest(uint64_t timeout) {
  Batch& oldest = at(0);
  if (!oldest.wait(timeout))
    return false;
  if (timeout > 0)
    patience_ = 1; // what comes after a result was waited for should begin soon
  finished_ = oldest.id();
  oldest_ = (oldest_ + 1) % batches_.size();
  --in_flight_;
  return true;
}

void Batches::retire_finished() {
  while (in_flight_ > 0 && retire_oldest(0)) {
  }
}

void Batches::wait_until_in_flight(size_t batches) {
  while (in_flight_ > batches)
    retire_oldest(hal::no_timeout);
}

void Batches::wait_for_oldest() {
  if (in_flight_ == 0)
    submit();
  if (in_flight_ > 0)
    retire_oldest(hal::no_timeout);
}

void Batches::finish() {
  submit();
  wait_until_in_flight(0);
}

} // namespace lapilli
