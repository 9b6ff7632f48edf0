#include "base/json.h"

#include "base/error.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace lapilli {

namespace {

// Length of the UTF-8 sequence at the start of `text`; 0 when it is not valid (RFC 3629).
size_t sequence(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80)
    return 1;
  if (first >= 0xc2 && first <= 0xdf)
    return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef)
    return follows(1, first == 0xe0 ? 0xa0 : 0x80, first == 0xed ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
  if (first >= 0xf0 && first <= 0xf4)
    return follows(1, first == 0xf0 ? 0x90 : 0x80, first == 0xf4 ? 0x8f : 0xbf) && follows(2) && follows(3) ? 4 : 0;
  return 0;
}

} // namespace

void Json::too_long() const {
  invalid_file("The description of the program is longer than ", limit_, " bytes, the limit (description_bytes).");
}

void Json::value(double number) {
  if (!std::isfinite(number))
    return null();
  separate();
  std::array<char, 32> text{};
  const auto result = std::to_chars(text.data(), text.data() + text.size(), number); // knows no locale
  out_.append(text.data(), result.ptr);
}

void Json::quote(std::string_view text) {
  out_ += '"';
  while (!text.empty()) {
    const char c = text.front();
    const size_t length = sequence(text);
    if (length == 0) {
      out_ += "\xef\xbf\xbd"; // U+FFFD
      text.remove_prefix(1);
      continue;
    }
    if (c == '"' || c == '\\') {
      out_ += '\\';
      out_ += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      out_ += escape.data();
    } else {
      out_ += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  out_ += '"';
}

} // namespace lapilli
