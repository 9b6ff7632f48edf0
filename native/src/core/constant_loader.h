// Bringing the constants of a file to a device, and running what its plans do with them at load.
#pragma once

#include "core/recorder.h"
#include "core/staging.h"
#include "format/container.h"

#include <unordered_set>

namespace lapilli {

// The memory that it writes must outlive it, for the device may still work on it.
class ConstantLoader {
public:
  // Through `staging_size` bytes (0: as many as pay), or less where the constants are fewer.
  ConstantLoader(hal::Device& device, const Model& model, const Container& file, uint64_t staging_size,
                 MemoryCounter& counter);

  // What is left of `to` becomes zero.
  void upload(const Constant& constant, const Region& to);
  // Runs the load commands of a plan, which read constants where they are staged, but for those that are `done`.
  void pack(const Shared& shared, const std::vector<bool>& done);
  void finish(); // waits for all of this

private:
  void read(const Constant& constant, uint64_t offset, std::span<std::byte> to); // before what is recorded is submitted
  void finish_reads();
  std::vector<uint32_t> lacking(const Dispatch& command, const Plan& plan);
  Region outside_staging(uint64_t bytes);
  void hold(const Shared& shared, const Launch& launch, size_t index, std::span<Region> slots);

  hal::Device& device_;
  const Model& model_;
  const Container& file_;
  MemoryCounter& counter_;
  const uint64_t alignment_;
  Staging staging_;
  std::unordered_set<uint32_t> held_; // buffers of a plan that are in staging memory for batch held_by_
  uint64_t held_by_ = 0;
  std::vector<GpuBuffer> large_; // for those that do not fit
  size_t large_used_ = 0;        // of these, by what is recorded
  Recorder recorder_;
  Batches batches_;
  struct Read { // bytes of a constant that are still to be read
    const Constant* constant;
    uint64_t offset;
    std::span<std::byte> to;
  };
  std::vector<Read> reads_;
  uint64_t waiting_ = 0; // their bytes
};

} // namespace lapilli
