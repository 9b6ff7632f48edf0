// Sizes by expressions, and the memory planner, for odd values of the symbols.

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const File file = repaired(data, size);
  if (file.empty())
    return 0;
  for (const int64_t value : {int64_t{3}, int64_t{0}, int64_t{1} << 62, int64_t{-1}, INT64_MIN})
    for (uint32_t method = 0; method < 2; ++method)
      for (uint32_t count = 0; count < 3; ++count) {
        const int64_t symbols[] = {value, 5};
        char* json = nullptr;
        const lapilli_status status =
            lapilli_plan_memory(file.data(), file.size(), 1, method, 0, symbols, count, &json);
        lapilli_free(json);
        expect(status, {LAPILLI_OK, LAPILLI_INVALID_FILE, LAPILLI_OUT_OF_MEMORY, LAPILLI_INVALID_ARGUMENT});
        if (status == LAPILLI_INVALID_FILE && method == 0 && count == 0)
          return 0; // the reader refused it
      }
  return 0;
}
