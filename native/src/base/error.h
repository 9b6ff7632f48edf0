// Failures inside the player are exceptions; the C ABI turns them into a status and a sentence (see api.cpp).
#pragma once

#include "base/text.h"
#include "lapilli.h"

#include <stdexcept>

namespace lapilli {

class Error : public std::runtime_error {
public:
  Error(lapilli_status code, const std::string& message) : std::runtime_error(message), status(code) {}
  lapilli_status status;
};

template <class... Parts> [[noreturn]] void fail(lapilli_status status, const Parts&... parts) {
  throw Error(status, cat(parts...));
}

// A file that is damaged or not ours.
template <class... Parts> [[noreturn]] void invalid_file(const Parts&... parts) {
  throw Error(LAPILLI_INVALID_FILE, cat(parts...));
}

template <class... Parts> void check_file(bool holds, const Parts&... parts) {
  if (!holds)
    throw Error(LAPILLI_INVALID_FILE, cat(parts...));
}

} // namespace lapilli
