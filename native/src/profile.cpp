// Timing every dispatch of a run, and reading buffers in the middle of one.

#include "error.h"
#include "run.h"

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

class QueryPool {
public:
  QueryPool(Device& device, uint32_t count) : device_(device), count_(count) {
    VkQueryPoolCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO;
    info.queryType = VK_QUERY_TYPE_TIMESTAMP;
    info.queryCount = count;
    check(device.vk.CreateQueryPool(device.handle, &info, nullptr, &handle_), "vkCreateQueryPool");
  }
  ~QueryPool() { device_.vk.DestroyQueryPool(device_.handle, handle_, nullptr); }
  QueryPool(const QueryPool&) = delete;
  QueryPool& operator=(const QueryPool&) = delete;

  void reset(VkCommandBuffer commands) { device_.vk.CmdResetQueryPool(commands, handle_, 0, count_); }

  // When all earlier commands have finished.
  void write(VkCommandBuffer commands, uint32_t query) {
    device_.vk.CmdWriteTimestamp(commands, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, handle_, query);
  }

  std::vector<uint64_t> ticks() {
    std::vector<uint64_t> result(count_);
    device_.check(device_.vk.GetQueryPoolResults(device_.handle, handle_, 0, count_, count_ * sizeof(uint64_t),
                                                 result.data(), sizeof(uint64_t),
                                                 VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
                  "vkGetQueryPoolResults");
    return result;
  }

private:
  Device& device_;
  uint32_t count_;
  VkQueryPool handle_ = VK_NULL_HANDLE;
};

uint64_t elapsed(const Capabilities& device, uint64_t from, uint64_t to) {
  const uint64_t mask = device.timestamp_bits >= 64 ? UINT64_MAX : (uint64_t{1} << device.timestamp_bits) - 1;
  return static_cast<uint64_t>(static_cast<double>((to - from) & mask) *
                               static_cast<double>(device.limits.timestampPeriod));
}

} // namespace

void Run::profile(uint32_t repeat, std::span<uint64_t> nanoseconds, uint64_t& total) {
  std::vector<std::vector<uint64_t>> samples(resolved_.size());
  std::vector<uint64_t> totals;
  submit(); // once without timing, so that nothing is done for the first time
  wait(no_timeout);
  if (shared_.device.capabilities.timestamp_bits != 0)
    profile_by_timestamps(repeat, samples, totals);
  else
    profile_by_clock(repeat, samples, totals);
  for (size_t i = 0; i < resolved_.size(); ++i)
    nanoseconds[i] = median(samples[i]);
  total = median(totals);
}

void Run::profile_by_timestamps(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples,
                                std::vector<uint64_t>& totals) {
  const Capabilities& device = shared_.device.capabilities;
  Commands pool(shared_.device, shared_.states.queue());
  {
    // Query 2 i is before command i, query 2 i + 1 after it. The commands are timed alone, one after the other.
    QueryPool queries(shared_.device, std::max<uint32_t>(1, static_cast<uint32_t>(2 * resolved_.size())));
    const VkCommandBuffer commands = pool.allocate();
    pool.begin(commands);
    queries.reset(commands);
    record_uploads(commands);
    for (uint32_t i = 0; i < resolved_.size(); ++i) {
      const Stage all{VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, stage::compute.access};
      barrier(shared_.device, commands, {all.stages, VK_ACCESS_SHADER_WRITE_BIT}, all);
      queries.write(commands, 2 * i);
      record_dispatches(commands, i, i + 1);
      queries.write(commands, 2 * i + 1);
    }
    record_downloads(commands);
    pool.end(commands);
    for (uint32_t r = 0; r < repeat && !resolved_.empty(); ++r) {
      pool.submit_and_wait(commands);
      const std::vector<uint64_t> ticks = queries.ticks();
      for (size_t i = 0; i < resolved_.size(); ++i)
        samples[i].push_back(resolved_[i].empty() ? 0 : elapsed(device, ticks[2 * i], ticks[2 * i + 1]));
    }
  }
  QueryPool queries(shared_.device, 2);
  const VkCommandBuffer commands = pool.allocate();
  pool.begin(commands);
  queries.reset(commands);
  queries.write(commands, 0);
  record_uploads(commands);
  record_dispatches(commands, 0, resolved_.size());
  record_downloads(commands);
  queries.write(commands, 1);
  pool.end(commands);
  for (uint32_t r = 0; r < repeat; ++r) {
    pool.submit_and_wait(commands);
    const std::vector<uint64_t> ticks = queries.ticks();
    totals.push_back(elapsed(device, ticks[0], ticks[1]));
  }
}

// For queues without timestamps: every command is submitted alone and the host's clock is read.
void Run::profile_by_clock(uint32_t repeat, std::vector<std::vector<uint64_t>>& samples,
                           std::vector<uint64_t>& totals) {
  Commands pool(shared_.device, shared_.states.queue());
  const VkCommandBuffer commands = pool.allocate();
  for (uint32_t r = 0; r < repeat; ++r) {
    for (size_t i = 0; i < resolved_.size(); ++i) {
      pool.begin(commands);
      record_dispatches(commands, i, i + 1);
      barrier(shared_.device, commands, stage::compute_write, stage::compute);
      pool.end(commands);
      const uint64_t start = nanoseconds_now();
      pool.submit_and_wait(commands);
      samples[i].push_back(resolved_[i].empty() ? 0 : nanoseconds_now() - start);
    }
    const uint64_t start = nanoseconds_now();
    submit();
    wait(no_timeout);
    totals.push_back(nanoseconds_now() - start);
  }
}

void Run::read_buffer(uint32_t command, uint32_t buffer, std::span<std::byte> to) {
  if (command >= resolved_.size())
    fail(LAPILLI_INVALID_ARGUMENT, "There is no run command ", command, ": the plan has ", resolved_.size(), ".");
  if (buffer >= regions_.size() || regions_[buffer].buffer == VK_NULL_HANDLE)
    fail(LAPILLI_INVALID_ARGUMENT, "There is no buffer ", buffer, " in a run of this plan, which has ", regions_.size(),
         " buffers (those of kind load_constant exist only while loading).");
  const Region& region = regions_[buffer];
  if (to.size() > region.size)
    fail(LAPILLI_INVALID_ARGUMENT, "Buffer ", buffer, " has ", region.size, " bytes, and ", to.size(),
         " were asked for.");
  if (to.empty())
    return;
  const GpuBuffer host(shared_.device, to.size(), MemoryUse::readback, shared_.counter, "a copy of a buffer");
  Commands pool(shared_.device, shared_.states.queue());
  const VkCommandBuffer commands = pool.allocate();
  pool.begin(commands);
  record_uploads(commands);
  record_dispatches(commands, 0, command + 1);
  barrier(shared_.device, commands, stage::compute_write | stage::host_write | stage::transfer_write,
          stage::transfer_read);
  const VkBufferCopy copy{region.offset, 0, to.size()};
  shared_.device.vk.CmdCopyBuffer(commands, region.buffer, host.handle(), 1, &copy);
  barrier(shared_.device, commands, stage::transfer_write, stage::host_read);
  pool.end(commands);
  pool.submit_and_wait(commands);
  host.invalidate();
  std::memcpy(to.data(), host.mapped(), to.size());
}

} // namespace lapilli
