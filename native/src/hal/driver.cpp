#include "hal/driver.h"

#include "base/error.h"
#include "base/platform.h"

#include <charconv>

namespace lapilli::hal {

uint32_t Driver::select(const char* wanted) const {
  std::string text = wanted != nullptr ? wanted : environment("LAPILLI_DEVICE").value_or("");
  if (text.empty())
    return 0;
  uint32_t index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error == std::errc() && end == text.data() + text.size()) {
    if (index < count())
      return index;
  } else {
    for (uint32_t i = 0; i < count(); ++i)
      if (contains_ignoring_case(capabilities(i).name, text) ||
          (text.size() == 36 && contains_ignoring_case(uuid_text(capabilities(i)), text)))
        return i;
  }
  std::vector<std::string> names;
  for (uint32_t i = 0; i < count(); ++i)
    names.push_back(cat(i, " (", capabilities(i).name, ")"));
  fail(LAPILLI_NO_DEVICE, "There is no ", capabilities(0).api, " device \"", text, "\"",
       wanted == nullptr ? " (from LAPILLI_DEVICE)" : "", "; this machine has ", listed(names),
       ". Give an index, a part of a name, or a UUID.");
}

} // namespace lapilli::hal
