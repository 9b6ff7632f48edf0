// The reader and the description: header, tables, indices, kernels.

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  char* json = nullptr;
  expect(lapilli_describe(data, size, 0, nullptr, &json), {LAPILLI_OK, LAPILLI_INVALID_FILE}); // as it is
  lapilli_free(json);
  const File file = repaired(data, size);
  if (file.empty())
    return 0;
  json = nullptr;
  const lapilli_status status = lapilli_describe(file.data(), file.size(), 0, nullptr, &json);
  expect(status, {LAPILLI_OK, LAPILLI_INVALID_FILE, LAPILLI_OUT_OF_MEMORY});
  lapilli_free(json);
  return 0;
}
