// The command line of the tools: --name=value, --name value, and -name as gflags allowed it.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

// What is wrong with what the user gave; the tool ends with status 2.
struct Usage {
  std::string message;
};

struct Flag {
  const char* name;
  const char* help; // begins with the value's name in capitals, unless it is a switch
  const char* value = "";
  bool repeated = false;

  bool is_switch() const { return help[0] < 'A' || help[0] > 'Z' || (help[1] >= 'a' && help[1] <= 'z'); }
};

class Arguments {
public:
  Arguments(int argc, char** argv, const char* usage, std::vector<Flag> flags)
      : usage_(usage), flags_(std::move(flags)), given_(flags_.size()) {
    for (int i = 1; i < argc; ++i) {
      std::string_view text = argv[i];
      if (text.size() < 2 || text.front() != '-') {
        others.emplace_back(text);
        continue;
      }
      text.remove_prefix(text.substr(0, 2) == "--" ? 2 : 1);
      const size_t equals = text.find('=');
      const std::string name(text.substr(0, equals));
      if (name == "help" || name == "h") {
        print_help();
        std::exit(EXIT_SUCCESS);
      }
      const size_t index = find(name);
      if (index == flags_.size())
        throw Usage{"There is no flag --" + name + ". --help lists all of them."};
      if (equals != std::string_view::npos)
        given_[index].emplace_back(text.substr(equals + 1));
      else if (flags_[index].is_switch())
        given_[index].emplace_back("true");
      else if (++i < argc)
        given_[index].emplace_back(argv[i]);
      else
        throw Usage{"--" + name + " wants a value. --help says which."};
      if (given_[index].size() > 1 && !flags_[index].repeated)
        throw Usage{"--" + name + " was given twice."};
    }
  }

  std::vector<std::string> others; // what is no flag

  const std::vector<std::string>& all(const char* name) const { return given_[find(name)]; }
  bool has(const char* name) const { return !all(name).empty(); }
  std::string text(const char* name) const {
    const size_t index = find(name);
    return given_[index].empty() ? flags_[index].value : given_[index].back();
  }
  bool is_on(const char* name) const {
    const std::string value = text(name);
    if (value == "true" || value == "1" || value == "yes")
      return true;
    if (value.empty() || value == "false" || value == "0" || value == "no")
      return false;
    throw Usage{"--" + std::string(name) + " is true or false; \"" + value + "\" was given."};
  }
  int64_t number(const char* name, int64_t least, int64_t most) const {
    return number_of(text(name), "--" + std::string(name), least, most);
  }
  static int64_t number_of(const std::string& value, const std::string& what, int64_t least, int64_t most) {
    int64_t result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < least || result > most)
      throw Usage{what + " is a number in " + std::to_string(least) + ".." + std::to_string(most) + "; \"" + value +
                  "\" was given."};
    return result;
  }

private:
  size_t find(std::string_view name) const {
    const auto found = std::find_if(flags_.begin(), flags_.end(), [&](const Flag& flag) { return flag.name == name; });
    return static_cast<size_t>(found - flags_.begin());
  }
  void print_help() const {
    std::printf("%s\n", usage_);
    for (const Flag& flag : flags_) {
      const std::string_view help = flag.help;
      const size_t space = flag.is_switch() ? 0 : help.find(' ');
      const std::string left =
          "--" + std::string(flag.name) + (space == 0 ? "" : "=" + std::string(help.substr(0, space)));
      std::printf("  %-24s %s%s%s%s\n", left.c_str(), std::string(help.substr(space == 0 ? 0 : space + 1)).c_str(),
                  flag.value[0] != '\0' ? " (" : "", flag.value, flag.value[0] != '\0' ? ")" : "");
    }
  }

  const char* usage_;
  std::vector<Flag> flags_;
  std::vector<std::vector<std::string>> given_;
};

inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}
