#include "core/planned_memory.h"

#include "base/platform.h"

#include <cstdlib>

namespace lapilli {

void PlannedMemory::lay_out(hal::Device& device, std::span<const uint64_t> sizes, MemoryUse use, MemoryCounter& counter,
                            const char* what) {
  const hal::Capabilities& capabilities = device.capabilities;
  ensure(device, sizes, plan_without_sharing(sizes, binding_alignment(capabilities), largest_block(capabilities)), use,
         counter, what);
}

void PlannedMemory::lay_out_apart(hal::Device& device, std::span<const uint64_t> sizes, MemoryUse use,
                                  MemoryCounter& counter, const char* what) {
  MemoryPlan plan;
  for (const uint64_t size : sizes) {
    plan.places.push_back({static_cast<uint32_t>(plan.blocks.size()), 0});
    plan.blocks.push_back(size);
  }
  ensure(device, sizes, std::move(plan), use, counter, what);
}

void PlannedMemory::ensure(hal::Device& device, std::span<const uint64_t> sizes, MemoryPlan plan, MemoryUse use,
                           MemoryCounter& counter, const char* what) {
  bool enough = buffers_.size() >= plan.blocks.size();
  for (size_t i = 0; enough && i < plan.blocks.size(); ++i)
    enough = buffers_[i].size() >= plan.blocks[i];
  sizes_.assign(sizes.begin(), sizes.end());
  places_ = std::move(plan.places);
  if (enough)
    return;
  buffers_.clear(); // first, so that old and new buffers are never there together
  for (const uint64_t block : plan.blocks)
    buffers_.emplace_back(device, block + binding_slack(), use, counter, what);
}

Region PlannedMemory::operator[](size_t tensor) const {
  const Place& place = places_[tensor];
  return buffers_[place.block].region(place.offset, sizes_[tensor]);
}

void PlannedMemory::invalidate() const {
  for (const GpuBuffer& buffer : buffers_)
    buffer.invalidate();
}

uint64_t PlannedMemory::size() const {
  uint64_t total = 0;
  for (const GpuBuffer& buffer : buffers_)
    total += buffer.size();
  return total;
}

uint64_t binding_slack() {
  static const uint64_t slack = [] {
    const auto given = environment("LAPILLI_BINDING_SLACK");
    return given ? std::strtoull(given->c_str(), nullptr, 10) / 16 * 16 : 0;
  }();
  return slack;
}

} // namespace lapilli
