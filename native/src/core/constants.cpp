#include "core/constants.h"

#include "base/error.h"
#include "core/recorder.h"
#include "core/staging.h"

#include <algorithm>

namespace lapilli {

Constants::Constants(hal::Device& device, const Model& model, std::span<const uint32_t> plans, uint64_t staging_size,
                     const Container& file, MemoryCounter& counter)
    : device_(device), model_(model), plans_(plans), staging_size_(staging_size), counter_(counter) {
  place();
  upload(file);
}

// Every canonical constant has one place, however many methods read it; every packed buffer has its own.
void Constants::place() {
  std::map<uint32_t, uint32_t> known; // constant -> place
  std::vector<std::vector<uint32_t>> place_of(model_.methods.size());
  constexpr uint32_t elsewhere = UINT32_MAX;
  for (uint32_t m = 0; m < model_.methods.size(); ++m) {
    const Method& method = model_.methods[m];
    const Values values(method.exprs, std::vector<int64_t>(method.symbols.size()));
    for (const Buffer& buffer : method.plans[plans_[m]].buffers) {
      uint32_t place = elsewhere;
      if (buffer.kind == BufferKind::constant || buffer.kind == BufferKind::packed) {
        const uint64_t size = values.size(buffer.size, "the size of a constant");
        if (size > device_.capabilities.device_memory)
          fail(LAPILLI_OUT_OF_MEMORY, device_.capabilities.name, " has ",
               human_size(device_.capabilities.device_memory), " of memory, and buffer \"", buffer.name,
               "\" of the program takes ", human_size(size), ". Choose another device with LAPILLI_DEVICE.");
        place = static_cast<uint32_t>(sizes_.size());
        if (buffer.kind == BufferKind::constant) {
          check_room(size, model_.constants[buffer.index].bytes, buffer);
          const auto [found, inserted] = known.emplace(buffer.index, place);
          place = found->second;
          if (!inserted)
            sizes_[place] = std::max(sizes_[place], size);
          else
            uploads_.emplace_back(buffer.index, place);
        }
        if (place == sizes_.size())
          sizes_.push_back(size);
      }
      place_of[m].push_back(place);
    }
  }
  const hal::Capabilities& device = device_.capabilities;
  const MemoryPlan plan = plan_without_sharing(sizes_, binding_alignment(device), largest_block(device));
  if (plan.total > device.device_memory)
    fail(LAPILLI_OUT_OF_MEMORY, device.name, " has ", human_size(device.device_memory),
         " of memory, and the constants of the program take ", human_size(plan.total),
         ". Choose another device with LAPILLI_DEVICE.");
  places_ = plan.places;
  blocks_.ensure(device_, plan.blocks, MemoryUse::device, counter_, "constants");
  for (uint32_t m = 0; m < model_.methods.size(); ++m) {
    std::vector<Region>& regions = regions_.emplace_back();
    for (const uint32_t place : place_of[m])
      regions.push_back(place == elsewhere ? Region{} : blocks_.region(places_[place], sizes_[place]));
  }
}

void Constants::upload(const Container& file) {
  uint64_t total = 0;
  for (const auto& [constant, place] : uploads_)
    total += align_up(sizes_[place], 4);
  if (total == 0)
    return;
  std::optional<Staging> staging;
  for (const auto& [constant, place] : uploads_) {
    const Constant& from = model_.constants[constant];
    if (std::byte* mapped = blocks_.mapped(places_[place])) {
      copy_constant(mapped, sizes_[place], file, from, 0);
      continue;
    }
    if (!staging)
      staging.emplace(device_, std::min(staging_size_, total), counter_);
    staging->upload(file, from, blocks_.region(places_[place], align_up(sizes_[place], 4)));
  }
  if (staging)
    staging->flush();
}

void Constants::pack(const Shared& shared, const Container& file) {
  if (shared.plan.load.empty())
    return;
  const Launch launch = Launch::of_load(shared);
  uint64_t needed = 0;
  for (size_t i = 0; i < launch.buffers.size(); ++i)
    if (const Buffer& buffer = shared.plan.buffers[i]; buffer.kind == BufferKind::load_constant) {
      const uint64_t size = launch.buffers[i].region.size;
      check_room(size, model_.constants[buffer.index].bytes, buffer);
      needed += align_up(std::max<uint64_t>(size, 1), binding_alignment(device_.capabilities));
    }
  Staging staging(device_, std::min(staging_size_, std::max<uint64_t>(needed, 1)), counter_);
  std::vector<Region> slots(launch.slots.size());
  const Placed placed{launch, shared.pipelines, slots};
  Recorder recorder;
  for (size_t i = 0; i < launch.commands.size(); ++i) {
    staging.hold(launch, i, shared.plan, model_, slots, file);
    recorder.prepare(staging.commands(), placed, i, i + 1);
    if (launch.commands[i].barrier)
      staging.commands().barrier(hal::Stage::compute_write, hal::compute);
    recorder.record(staging.commands(), placed);
  }
  staging.flush();
}

} // namespace lapilli
