// What the first-run check found on earlier starts, in files of the cache folder.
#pragma once

#include "base/platform.h"

#include <optional>
#include <string>

namespace lapilli {

class Program;

enum class Finding : uint8_t {
  right,   // the best plans compute what the plainest ones do
  plain,   // they do not: the plainest ones are taken
  refused, // nothing that the device computes can be trusted
};

struct Verdict {
  Finding finding = Finding::right;
  std::string why; // a sentence, where it is not right
};

// The verdict on one file, device, driver and choice of plans.
class VerdictFile {
public:
  // `folder`: of the cache; empty: nothing is kept. `by_name`: the plan was asked for, and must not change.
  VerdictFile(const std::string& folder, const Program& program, bool by_name);

  std::optional<Verdict> read() const;      // nothing where there is none, or what is there is damaged
  void write(const Verdict& verdict) const; // where that is possible

private:
  std::string path_;
  uint64_t key_ = 0; // begins the file's checksum
};

} // namespace lapilli
