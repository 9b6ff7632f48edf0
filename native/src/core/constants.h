// Where the constants of a program lie on the device.
#pragma once

#include "core/planned_memory.h"
#include "format/model.h"

namespace lapilli {

class ConstantLoader;

// Memory of all constants that stay on the device, canonical and packed.
class Constants {
public:
  // `plans[m]`: the plan taken of method m.
  Constants(hal::Device& device, const Model& model, std::span<const uint32_t> plans, MemoryCounter& counter);

  // Those that are not packed.
  void upload(ConstantLoader& loader) const;

  // For every buffer of the plan of a method: where it is; empty for kinds that belong to a run.
  std::span<const Region> regions(uint32_t method) const { return regions_[method]; }
  // For every load command of the plan of a method: whether a method before it, or another command, packs the same.
  const std::vector<bool>& repeated(uint32_t method) const { return repeated_[method]; }
  uint64_t size() const { return memory_.size(); }

private:
  struct Part { // a place that is a part of another one
    uint32_t place, whole;
    uint64_t first;
  };

  std::vector<Part> find_parts(std::span<const uint64_t> sizes, uint64_t alignment);

  const Model& model_;
  PlannedMemory memory_;
  std::vector<std::pair<uint32_t, uint32_t>> uploads_; // constant, place
  std::vector<std::vector<Region>> regions_;
  std::vector<std::vector<bool>> repeated_;
};

} // namespace lapilli
