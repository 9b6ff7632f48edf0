// Batches of work in order: the oldest ones in flight, then the one that is recorded, which is submitted when it pays.
#pragma once

#include "core/batch.h"

namespace lapilli {

class Batches {
public:
  // `readers`: see Batch::end.
  Batches(hal::Device& device, hal::Stage readers);
  ~Batches(); // waits for those in flight; what is recorded does not take place
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // The batch that is recorded, begun where there is none. Where it throws, nothing of what the caller wants was recorded.
  Batch& record();
  bool recording() const { return recording_; } // or what was recorded could not be submitted yet
  uint64_t id() const { return recording_ ? at(in_flight_).id() : 0; }

  // Where it throws OUT_OF_MEMORY and nothing is lost, what was recorded is kept, and submitted by a later call.
  void submit();
  // What the caller wanted is recorded: submits it, if it is time. It is queued, whether or not it can be submitted now.
  void submit_if_due();
  // Drops what is recorded. The states that it was to change hold anything.
  void drop() noexcept;
  bool lost() const { return lost_; } // the driver could not write down what was recorded

  size_t in_flight() const { return in_flight_; }
  void retire_finished();
  void wait_until_in_flight(size_t batches);
  void wait_for_oldest(); // of those that are not finished, the recorded one included
  void finish();          // submits, and waits for all
  bool has_finished(uint64_t id) const { return id <= finished_; }

private:
  Batch& at(size_t index) const { return *batches_[(oldest_ + index) % batches_.size()]; }
  bool retire_oldest(uint64_t timeout);
  void look_later();

  hal::Device& device_;
  const hal::Stage readers_;
  std::vector<std::unique_ptr<Batch>> batches_; // a ring; made when first needed
  size_t oldest_ = 0, in_flight_ = 0;
  bool recording_ = false;
  std::atomic<bool> lost_{false};
  uint64_t finished_ = 0; // the id of the last one that is
  uint64_t look_at_ = 0;  // so many commands, or so much work: time to see whether the device is idle
  uint64_t look_at_work_ = 0;
  uint32_t patience_ = 1; // until then, in units of commands_for_idle and work_for_idle
};

} // namespace lapilli
