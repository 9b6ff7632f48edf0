#include "format/file_limits.h"

#include "base/error.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

Limits Limits::of(const lapilli_limits* given) {
  Limits limits;
  if (given == nullptr)
    return limits;
  lapilli_limits known{};
  if (given->struct_size < sizeof given->struct_size || given->struct_size > 4096)
    fail(LAPILLI_INVALID_ARGUMENT, "`struct_size` of the limits is ", given->struct_size,
         "; it must be sizeof(lapilli_limits).");
  std::memcpy(&known, given, static_cast<size_t>(std::min<uint64_t>(given->struct_size, sizeof known)));
  const auto take = [](uint64_t wanted, uint64_t& limit) {
    if (wanted != 0)
      limit = wanted;
  };
  take(known.structure_bytes, limits.structure_bytes);
  take(known.code_bytes, limits.code_bytes);
  take(known.entries, limits.entries);
  take(known.expressions, limits.expressions);
  take(known.description_bytes, limits.description_bytes);
  take(known.device_bytes, limits.device_bytes);
  take(known.groups, limits.groups);
  take(known.run_nanoseconds, limits.run_nanoseconds);
  return limits;
}

} // namespace lapilli
