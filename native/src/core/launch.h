// What one run of a method records, computed once for given symbols; only where its slots lie is left open. Streams place them in
// memory that they hand out, a Run in memory of its own.
#pragma once

#include "core/dispatch.h"
#include "core/paths.h"
#include "core/states.h"
#include "format/file_limits.h"

#include <map>

namespace lapilli {

using Symbols = std::vector<int64_t>;

// What all runs of a method share.
struct Shared {
  hal::Device& device;
  const Method& method;
  const Plan& plan;
  std::span<const Kernel> kernels;
  const hal::Pipelines& pipelines;
  std::span<const Region> constants; // of the plan's buffers
  Paths paths;
  MemoryCounter& counter;
  const States& states;
  const Limits& limits;
};

// Throws INVALID_ARGUMENT for values that the method does not take.
void check_symbols(const Method& method, std::span<const int64_t> symbols);

// Who does the commands that round inputs to halves (see `rounds_input` in program.fbs): the host, while it copies, or the device.
enum class Rounding { host, device };

struct Launch {
  // Throws INVALID_ARGUMENT for values of symbols that the method does not take. `slack`: bytes by which bindings of slots are
  // widened.
  Launch(const Shared& shared, std::span<const int64_t> symbols, Rounding rounding, uint64_t slack = 0);

  // What a plan does at load. The slots are its load_constant buffers.
  static Launch of_load(const Shared& shared);

  // What is given for a run: inputs, outputs and blocks of the arena, in this order.
  struct Slot {
    uint64_t tensor;    // bytes of the tensor
    uint64_t bound;     // bytes that kernels may see: the last word of a tensor is written whole
    uint64_t reach = 0; // bytes up to which it is bound: `bound`, or a little more (see resolve_binding)
    size_t first_written = SIZE_MAX, last_read = 0; // commands, from 1
  };
  static constexpr uint32_t fixed = UINT32_MAX;
  struct Bound {
    Region region; // relative to its slot
    uint32_t slot; // fixed: a constant or a state

    Region in(std::span<const Region> places) const {
      if (slot == fixed)
        return region;
      return {places[slot].buffer, places[slot].offset + region.offset, region.size};
    }
  };
  struct Command {
    const Dispatch* dispatch;
    std::array<uint32_t, 3> groups;
    uint32_t first_binding, first_param;
    uint32_t index; // of the plan's commands
    bool barrier;
  };

  // The first of the commands that is not before this one of the plan.
  size_t at(size_t index) const;

  std::vector<std::vector<int64_t>> shapes; // of the inputs and outputs
  std::vector<Slot> slots;
  std::vector<bool> in_halves;   // inputs: whether their slots hold them rounded to halves
  std::vector<Bound> buffers;    // of the plan
  std::vector<Command> commands; // without those that have no work
  std::vector<Bound> bindings;
  std::vector<uint32_t> params;
  uint64_t work = 0;                       // about the bytes that the device could move meanwhile
  uint64_t arena_total = 0, arena_sum = 0; // bytes of the arena, and without sharing

private:
  Launch() = default;
  void place(const Shared& shared, const Values& values, Rounding rounding);
  void place_arena(const Shared& shared, const Values& values);
  bool is_left_out(const Shared& shared, const Dispatch& dispatch) const;
  void add(const Shared& shared, std::span<const Dispatch> dispatches, const Values& values, uint64_t slack);
};

// The launches of the symbols that a method was last used with.
class Launches {
public:
  const Launch& get(const Shared& shared, std::span<const int64_t> symbols);

private:
  struct Less {
    using is_transparent = void;
    bool operator()(std::span<const int64_t> a, std::span<const int64_t> b) const {
      return std::ranges::lexicographical_compare(a, b);
    }
  };
  std::map<Symbols, Launch, Less> launches_;
};

} // namespace lapilli
