#include "core/constants.h"

#include "base/error.h"
#include "core/constant_loader.h"

#include <algorithm>
#include <map>

namespace lapilli {

// Every canonical constant has one place, however many methods read it; every packed buffer has its own.
Constants::Constants(hal::Device& device, const Model& model, std::span<const uint32_t> plans, MemoryCounter& counter)
    : model_(model) {
  const hal::Capabilities& capabilities = device.capabilities;
  std::vector<uint64_t> sizes;        // of places
  std::map<uint32_t, uint32_t> known; // constant -> place
  std::vector<std::vector<uint32_t>> place_of(model.methods.size());
  constexpr uint32_t elsewhere = UINT32_MAX;
  for (uint32_t m = 0; m < model.methods.size(); ++m) {
    const Method& method = model.methods[m];
    const Values values(method.exprs, std::vector<int64_t>(method.symbols.size()));
    for (const Buffer& buffer : method.plans[plans[m]].buffers) {
      uint32_t place = elsewhere;
      if (buffer.kind == BufferKind::constant || buffer.kind == BufferKind::packed) {
        const uint64_t size = values.size(buffer.size, "the size of a constant");
        if (size > capabilities.device_memory)
          fail(LAPILLI_OUT_OF_MEMORY, capabilities.name, " has ", human_size(capabilities.device_memory),
               " of memory, and buffer \"", buffer.name, "\" of the program takes ", human_size(size),
               ". Choose another device with LAPILLI_DEVICE.");
        place = static_cast<uint32_t>(sizes.size());
        if (buffer.kind == BufferKind::constant) {
          check_room(size, model.constants[buffer.index].bytes, buffer);
          const auto [found, inserted] = known.emplace(buffer.index, place);
          place = found->second;
          if (!inserted)
            sizes[place] = std::max(sizes[place], size);
          else
            uploads_.emplace_back(buffer.index, place);
        }
        if (place == sizes.size())
          sizes.push_back(size);
      }
      place_of[m].push_back(place);
    }
  }
  uint64_t total = 0;
  for (const uint64_t size : sizes)
    total += align_up(size, binding_alignment(capabilities));
  if (total > capabilities.device_memory)
    fail(LAPILLI_OUT_OF_MEMORY, capabilities.name, " has ", human_size(capabilities.device_memory),
         " of memory, and the constants of the program take ", human_size(total),
         ". Choose another device with LAPILLI_DEVICE.");
  memory_.lay_out(device, sizes, MemoryUse::device, counter, "constants");
  for (const std::vector<uint32_t>& places : place_of) {
    std::vector<Region>& regions = regions_.emplace_back();
    for (const uint32_t place : places)
      regions.push_back(place == elsewhere ? Region{} : memory_[place]);
  }
}

void Constants::upload(ConstantLoader& loader) const {
  for (const auto& [constant, place] : uploads_) {
    const Region to = memory_[place];
    loader.upload(model_.constants[constant], {to.buffer, to.offset, align_up(to.size, 4)});
  }
}

} // namespace lapilli
