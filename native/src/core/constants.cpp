#include "core/constants.h"

#include "base/error.h"
#include "core/constant_loader.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

namespace lapilli {

namespace {

constexpr uint32_t elsewhere = UINT32_MAX;

// Numbers for what packed buffers hold: equal ones if, and only if, the same commands make them of the same constants.
class Contents {
public:
  // For every buffer of a plan; 0: nothing, or no packed buffer.
  std::vector<uint32_t> of(const Plan& plan, const Values& values) {
    std::vector<uint32_t> held(plan.buffers.size());
    for (const Dispatch& command : plan.load) {
      std::string text = cat(command.kernel);
      const auto add = [&](auto number) { text += cat(' ', number); };
      for (const ExprIndex param : command.params)
        add(values[param]);
      for (const ExprIndex groups : command.groups)
        add(values[groups]);
      for (size_t i = 0; i < command.bindings.size(); ++i) {
        const Binding& binding = command.bindings[i];
        const Buffer& buffer = plan.buffers[binding.buffer];
        const bool packed = buffer.kind == BufferKind::packed;
        text += packed ? 'p' : 'c';
        add(packed ? held[binding.buffer] : buffer.index);
        add(values[buffer.size]);
        add(values[binding.offset]);
        add(values[binding.size]);
        // Which of the packed buffers are one
        add(std::ranges::find(command.bindings, binding.buffer, &Binding::buffer) - command.bindings.begin());
      }
      for (size_t i = 0; i < command.bindings.size(); ++i)
        if ((command.written >> i & 1) != 0)
          held[command.bindings[i].buffer] = number(cat(text, " > ", i));
    }
    return held;
  }

private:
  uint32_t number(std::string text) {
    return known_.emplace(std::move(text), static_cast<uint32_t>(known_.size() + 1)).first->second;
  }

  std::map<std::string, uint32_t> known_;
};

} // namespace

// Every canonical constant has one place, however many methods read it, and so has what is packed in the same way. A constant that
// is a part of another one in the file, where a binding may begin, is a part of it here.
Constants::Constants(hal::Device& device, const Model& model, std::span<const uint32_t> plans, MemoryCounter& counter)
    : model_(model) {
  const hal::Capabilities& capabilities = device.capabilities;
  std::vector<uint64_t> sizes;                            // of places
  std::map<uint32_t, uint32_t> known;                     // constant -> place
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> same; // content and size of packed buffers -> place
  std::vector<std::vector<uint32_t>> place_of(model.methods.size());
  Contents contents;
  for (uint32_t m = 0; m < model.methods.size(); ++m) {
    const Method& method = model.methods[m];
    const Plan& plan = method.plans[plans[m]];
    const Values values(method.exprs, std::vector<int64_t>(method.symbols.size()));
    const std::vector<uint32_t> held = contents.of(plan, values);
    std::vector<bool> made(plan.buffers.size()); // here, and not before
    for (uint32_t i = 0; i < plan.buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
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
        } else {
          const auto found = held[i] == 0 ? same.end() : same.try_emplace({held[i], size}, place).first;
          made[i] = found == same.end() || found->second == place;
          place = made[i] ? place : found->second;
        }
        if (place == sizes.size())
          sizes.push_back(size);
      }
      place_of[m].push_back(place);
    }
    std::vector<bool>& repeated = repeated_.emplace_back();
    for (const Dispatch& command : plan.load) {
      bool is_needed = false;
      for (size_t i = 0; i < command.bindings.size(); ++i)
        is_needed = is_needed || ((command.written >> i & 1) != 0 && made[command.bindings[i].buffer]);
      repeated.push_back(!is_needed);
    }
  }
  const uint64_t alignment = binding_alignment(capabilities);
  const std::vector<Part> parts = find_parts(sizes, alignment);
  std::vector<uint64_t> own = sizes;
  for (const Part& part : parts)
    own[part.place] = 0;
  uint64_t total = 0;
  for (const uint64_t size : own)
    total += align_up(size, alignment);
  if (total > capabilities.device_memory)
    fail(LAPILLI_OUT_OF_MEMORY, capabilities.name, " has ", human_size(capabilities.device_memory),
         " of memory, and the constants of the program take ", human_size(total),
         ". Choose another device with LAPILLI_DEVICE.");
  memory_.lay_out(device, own, MemoryUse::device, counter, "constants");
  std::vector<Region> places;
  for (size_t i = 0; i < own.size(); ++i)
    places.push_back(memory_[i]);
  for (const Part& part : parts)
    places[part.place] = {places[part.whole].buffer, places[part.whole].offset + part.first, sizes[part.place]};
  for (const std::vector<uint32_t>& of_method : place_of) {
    std::vector<Region>& regions = regions_.emplace_back();
    for (const uint32_t place : of_method)
      regions.push_back(place == elsewhere ? Region{} : places[place]);
  }
}

// Removes constants from the uploads whose bytes another one brings, and says where these are.
std::vector<Constants::Part> Constants::find_parts(std::span<const uint64_t> sizes, uint64_t alignment) {
  const auto begins_earlier = [&](const auto& a, const auto& b) {
    const Constant &x = model_.constants[a.first], &y = model_.constants[b.first];
    return std::tuple(x.offset, y.bytes, a.first) < std::tuple(y.offset, x.bytes, b.first);
  };
  auto sorted = uploads_;
  std::ranges::sort(sorted, begins_earlier);
  std::vector<Part> parts;
  const std::pair<uint32_t, uint32_t>* whole = nullptr;
  for (const auto& upload : sorted) {
    const Constant& constant = model_.constants[upload.first];
    if (whole != nullptr) {
      const Constant& around = model_.constants[whole->first];
      const uint64_t first = constant.offset - around.offset;
      if (first < around.bytes && sizes[upload.second] <= around.bytes - first) {
        if (first % alignment == 0)
          parts.push_back({upload.second, whole->second, first});
        continue;
      }
    }
    whole = &upload;
  }
  std::erase_if(uploads_, [&](const auto& upload) {
    return std::ranges::find(parts, upload.second, &Part::place) != parts.end();
  });
  return parts;
}

void Constants::upload(ConstantLoader& loader) const {
  for (const auto& [constant, place] : uploads_) {
    const Region to = memory_[place];
    loader.upload(model_.constants[constant], {to.buffer, to.offset, align_up(to.size, 4)});
  }
}

} // namespace lapilli
