#include "core/batch.h"

namespace lapilli {

namespace {

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

} // namespace

Batch::Batch(hal::Device& device) : commands_(device.create_commands(hal::Order::submitted)) {}

void Batch::begin() {
  commands_->begin();
  id_ = next_id();
  ended_ = false;
}

void Batch::end() {
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

} // namespace lapilli
