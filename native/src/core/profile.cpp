// Timing every dispatch of a run, and reading buffers in the middle of one.

#include "base/error.h"
#include "core/run.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

namespace {

uint64_t median(std::vector<uint64_t>& samples) {
  if (samples.empty())
    return 0;
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

uint64_t elapsed(const hal::Capabilities& device, uint64_t from, uint64_t to) {
  const uint64_t mask = device.timestamp_bits >= 64 ? UINT64_MAX : (uint64_t{1} << device.timestamp_bits) - 1;
  return static_cast<uint64_t>(static_cast<double>((to - from) & mask) * device.timestamp_period);
}

} // namespace

void Run::profile(uint32_t repeat, std::span<uint64_t> nanoseconds, uint64_t& total) {
  std::vector<std::vector<uint64_t>> samples(shared_.plan.run.size());
  std::vector<uint64_t> totals;
  submit(); // once without timing, so that nothing is done for the first time
  wait(hal::no_timeout);
  if (shared_.device.capabilities.timestamp_bits != 0)
    profile_by_timestamps(repeat, samples, totals);
  else
    profile_by_clock(repeat, samples, totals);
  for (size_t i = 0; i < samples.size(); ++i)
    nanoseconds[i] = median(samples[i]);
  total = median(totals);
}

void Run::profile_by_timestamps(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples,
                                std::vector<uint64_t>& totals) {
  const hal::Capabilities& device = shared_.device.capabilities;
  const auto commands = shared_.device.create_commands(shared_.states.order());
  {
    // Time 2 i is before command i, 2 i + 1 after it. The commands are timed alone, one after the other.
    const auto times =
        shared_.device.create_timestamps(std::max<uint32_t>(1, static_cast<uint32_t>(2 * samples.size())));
    commands->begin();
    times->reset(*commands);
    record_uploads(*commands);
    for (uint32_t i = 0; i < samples.size(); ++i) {
      commands->barrier(hal::Stage::everything | hal::Stage::compute_write, hal::Stage::everything | hal::compute);
      times->write(*commands, 2 * i);
      record_dispatches(*commands, i, i + 1);
      times->write(*commands, 2 * i + 1);
    }
    record_downloads(*commands);
    commands->end();
    for (uint32_t r = 0; r < repeat && !samples.empty(); ++r) {
      commands->submit_and_wait();
      const std::vector<uint64_t> ticks = times->ticks();
      for (size_t i = 0; i < samples.size(); ++i)
        samples[i].push_back(has_no_work(i) ? 0 : elapsed(device, ticks[2 * i], ticks[2 * i + 1]));
    }
  }
  const auto times = shared_.device.create_timestamps(2);
  commands->begin();
  times->reset(*commands);
  times->write(*commands, 0);
  record_uploads(*commands);
  record_dispatches(*commands, 0, samples.size());
  record_downloads(*commands);
  times->write(*commands, 1);
  commands->end();
  for (uint32_t r = 0; r < repeat; ++r) {
    commands->submit_and_wait();
    const std::vector<uint64_t> ticks = times->ticks();
    totals.push_back(elapsed(device, ticks[0], ticks[1]));
  }
}

// For queues without timestamps: every command is submitted alone and the host's clock is read.
void Run::profile_by_clock(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples,
                           std::vector<uint64_t>& totals) {
  const auto commands = shared_.device.create_commands(shared_.states.order());
  for (uint32_t r = 0; r < repeat; ++r) {
    for (size_t i = 0; i < samples.size(); ++i) {
      commands->begin();
      record_dispatches(*commands, i, i + 1);
      commands->barrier(hal::Stage::compute_write, hal::compute);
      commands->end();
      const uint64_t start = nanoseconds_now();
      commands->submit_and_wait();
      samples[i].push_back(has_no_work(i) ? 0 : nanoseconds_now() - start);
    }
    const uint64_t start = nanoseconds_now();
    submit();
    wait(hal::no_timeout);
    totals.push_back(nanoseconds_now() - start);
  }
}

void Run::read_buffer(uint32_t command, uint32_t buffer, std::span<std::byte> to) {
  const size_t commands_of_plan = shared_.plan.run.size(), buffers = launch_->buffers.size();
  if (command >= commands_of_plan)
    fail(LAPILLI_INVALID_ARGUMENT, "There is no run command ", command, ": the plan has ", commands_of_plan, ".");
  const Region region = buffer < buffers ? launch_->buffers[buffer].in(slots_) : Region();
  if (region.buffer == nullptr)
    fail(LAPILLI_INVALID_ARGUMENT, "There is no buffer ", buffer, " in a run of this plan, which has ", buffers,
         " buffers (those of kind load_constant exist only while loading, and an input that the host rounds to halves "
         "never).");
  if (to.size() > region.size)
    fail(LAPILLI_INVALID_ARGUMENT, "Buffer ", buffer, " has ", region.size, " bytes, and ", to.size(),
         " were asked for.");
  if (to.empty())
    return;
  const GpuBuffer host(shared_.device, to.size(), MemoryUse::readback, shared_.counter, "a copy of a buffer");
  const auto commands = shared_.device.create_commands(shared_.states.order());
  commands->begin();
  record_uploads(*commands);
  record_dispatches(*commands, 0, command + 1);
  commands->barrier(hal::Stage::compute_write | hal::Stage::host_write | hal::Stage::transfer_write,
                    hal::Stage::transfer_read);
  commands->copy(region, host.region(0, to.size()));
  commands->barrier(hal::Stage::transfer_write, hal::Stage::host_read);
  commands->end();
  commands->submit_and_wait();
  host.invalidate();
  std::memcpy(to.data(), host.mapped(), to.size());
}

} // namespace lapilli
