// The bounded buffer through which constants travel from the file to the device.
#pragma once

#include "core/launch.h"
#include "format/container.h"

#include <unordered_set>

namespace lapilli {

// Copies bytes [offset, offset + size) of a constant that is followed by zeros.
void copy_constant(std::byte* to, uint64_t size, const Container& file, const Constant& constant, uint64_t offset);

class Staging {
public:
  Staging(hal::Device& device, uint64_t size, MemoryCounter& counter);

  // Uploads a constant in pieces; what is left of `to` becomes zero.
  void upload(const Container& file, const Constant& constant, const Region& to);

  // Makes the constants that command `index` of what is done at load reads available to it, in the staging buffer itself, and
  // places their slots. Commands recorded so far are run first when there is no room.
  void hold(const Launch& launch, size_t index, const Plan& plan, const Model& model, std::span<Region> slots,
            const Container& file);

  // Where commands that read the staging buffer are recorded.
  hal::Commands& commands();

  // Runs what was recorded and waits; afterwards the buffer is empty again.
  void flush();

private:
  std::vector<uint32_t> lacking(const Dispatch& command, const Plan& plan) const;

  hal::Device& device_;
  MemoryCounter& counter_;
  GpuBuffer buffer_;
  std::unique_ptr<hal::Commands> commands_;
  bool recording_ = false;
  uint64_t used_ = 0;
  std::unordered_set<uint32_t> held_; // buffers of the plan
  std::vector<GpuBuffer> large_;      // for constants that do not fit
};

} // namespace lapilli
