#include "core/batch.h"

#include <algorithm>

namespace lapilli {

namespace {

constexpr size_t most_accesses = 128; // to search before a barrier is cheaper
constexpr hal::Stage written = hal::Stage::compute_write | hal::Stage::transfer_write;
constexpr hal::Stage work_stage = hal::compute | hal::Stage::transfer_read | hal::Stage::transfer_write;

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

} // namespace

Batch::Batch(hal::Device& device, hal::Order order) : commands_(device.create_commands(order)) {}

void Batch::begin() {
  commands_->begin();
  commands_->barrier(work_stage, work_stage);
  id_ = next_id();
  ended_ = false;
  accesses_.clear();
  recorded_ = 0;
  work_ = 0;
}

void Batch::end(hal::Stage readers) {
  commands_->barrier(written, readers);
  commands_->end();
  ended_ = true;
}

void Batch::submit() { commands_->submit(); }

bool Batch::wait(uint64_t timeout) {
  if (!commands_->wait(timeout))
    return false;
  commands_->release();
  programs_.clear();
  return true;
}

bool Batch::conflicts(const Region& region, bool writes) const {
  return std::ranges::any_of(
      accesses_, [&](const Access& earlier) { return (earlier.written || writes) && overlap(earlier.region, region); });
}

void Batch::wait_for(std::span<const Region> regions, size_t reads) {
  accesses_.reserve(std::max(most_accesses, regions.size()) + 2); // for these, or for those of a copy after them
  bool wait = accesses_.size() + regions.size() > most_accesses;
  for (size_t i = 0; i < regions.size() && !wait; ++i)
    wait = conflicts(regions[i], i >= reads);
  if (wait) {
    commands_->barrier(work_stage, work_stage);
    accesses_.clear();
  }
  for (size_t i = 0; i < regions.size(); ++i)
    accesses_.push_back({regions[i], i >= reads});
}

void Batch::copy(const Region& from, const Region& to) {
  wait_for(std::array{from, to}, 1);
  commands_->copy(from, to);
  count(1, to.size);
}

void Batch::fill(const Region& to, uint32_t word) {
  wait_for(std::array{to}, 0);
  commands_->fill(to, word);
  count(1, to.size);
}

void Batch::count(size_t commands, uint64_t work) {
  recorded_ += commands;
  work_ += work;
}

} // namespace lapilli
