// What one run of a method records, computed once for given symbols; only where its tensors lie is left open.
#pragma once

#include "core/run.h"

#include <map>

namespace lapilli {

// Throws INVALID_ARGUMENT for values that the method does not take.
void check_symbols(const Method& method, std::span<const int64_t> symbols);

struct Launch {
  // `shared`: of the method. Throws INVALID_ARGUMENT for values of symbols that the method does not take.
  Launch(const Shared& shared, std::span<const int64_t> symbols);

  // What is given for a run: inputs, outputs and blocks of the arena, in this order.
  struct Slot {
    uint64_t tensor; // bytes of the tensor
    uint64_t bound;  // bytes that kernels may see: the last word of a tensor is written whole
    size_t first_written = SIZE_MAX, last_read = 0; // commands, from 1
  };
  static constexpr uint32_t fixed = UINT32_MAX;
  struct Bound {
    Region region; // relative to its slot
    uint32_t slot; // fixed: a constant or a state
  };
  struct Command {
    const Dispatch* dispatch;
    std::array<uint32_t, 3> groups;
    uint32_t first_binding, first_param;
    bool barrier;
  };

  std::vector<Slot> slots;
  std::vector<Command> commands; // without those that have no work
  std::vector<Bound> bindings;
  std::vector<uint32_t> params;
  uint64_t work = 0; // about the bytes that the device could move meanwhile
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
