// Writing JSON.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace lapilli {

// json.object([&] { json.field("name", "x"); json.key("list"); json.array([&] { json.value(3); }); });
// Text that is not valid UTF-8 is written with replacement characters, so the result always parses.
class Json {
public:
  explicit Json(uint64_t limit = UINT64_MAX) : limit_(limit) {}

  template <class F> void object(F&& f) { nested('{', '}', f); }
  template <class F> void array(F&& f) { nested('[', ']', f); }

  void key(std::string_view name) {
    separate();
    quote(name);
    out_ += ':';
    first_ = true; // the value that follows needs no comma
  }

  void value(std::string_view text) {
    separate();
    quote(text);
  }
  void value(const char* text) { value(std::string_view(text)); }
  void value(const std::string& text) { value(std::string_view(text)); }
  void value(bool flag) {
    separate();
    out_ += flag ? "true" : "false";
  }
  template <std::integral T> void value(T number) {
    separate();
    out_ += std::to_string(number);
  }
  void value(double number);
  void null() {
    separate();
    out_ += "null";
  }

  template <class T> void field(std::string_view name, const T& content) {
    key(name);
    value(content);
  }
  template <class Range> void list(std::string_view name, const Range& items) {
    key(name);
    array([&] {
      for (const auto& item : items)
        value(item);
    });
  }

  const std::string& text() const { return out_; }

private:
  template <class F> void nested(char open, char close, F&& f) {
    separate();
    out_ += open;
    first_ = true;
    f();
    out_ += close;
    first_ = false;
  }
  void separate() {
    if (out_.size() > limit_)
      too_long();
    if (!first_)
      out_ += ',';
    first_ = false;
  }
  void quote(std::string_view text);

  [[noreturn]] void too_long() const;

  std::string out_;
  uint64_t limit_; // bytes, beyond which it throws
  bool first_ = true;
};

} // namespace lapilli
