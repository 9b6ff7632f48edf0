// Bringing a plan's constants to the device, and running its load commands.
#pragma once

#include "core/memory.h"
#include "format/container.h"
#include "format/model.h"

#include <map>

namespace lapilli {

struct Shared;

// Device memory of all constants of a program that stay on the device, canonical and packed.
class Constants {
public:
  // `plans[m]`: the plan taken of method m. Constants are uploaded by the constructor.
  Constants(hal::Device& device, const Model& model, std::span<const uint32_t> plans, uint64_t staging_size,
            const Container& file, MemoryCounter& counter);

  // Runs the load commands of a method.
  void pack(const Shared& shared, const Container& file);

  // For every buffer of the plan of a method: where it is; empty for kinds that belong to a run.
  std::span<const Region> regions(uint32_t method) const { return regions_[method]; }
  uint64_t size() const { return blocks_.size(); }

private:
  void place();
  void upload(const Container& file);

  hal::Device& device_;
  const Model& model_;
  std::span<const uint32_t> plans_;
  uint64_t staging_size_;
  MemoryCounter& counter_;
  Blocks blocks_;
  std::vector<Place> places_;
  std::vector<std::pair<uint32_t, uint32_t>> uploads_; // constant, place
  std::vector<uint64_t> sizes_;                        // of places
  std::vector<std::vector<Region>> regions_;
};

} // namespace lapilli
