// The compiled kernels of a program.
#pragma once

#include <cstdint>
#include <string>

namespace lapilli::hal {

struct Pipeline {
  // Whether buffers are bound to it by a set, which Commands::prepare makes before anything is recorded.
  bool uses_sets = false;

protected:
  ~Pipeline() = default;
};

// The driver compiles on threads of its own from construction on, and finish() waits for it.
class Pipelines {
public:
  virtual ~Pipelines() = default;

  // Throws what a thread threw. Afterwards the kernels' code is not needed any more.
  virtual void finish() = 0;

  virtual const Pipeline& operator[](uint32_t kernel) const = 0;

  // What became of the cache file, for lapilli_program_info.
  struct Cache {
    std::string file;
    bool found = false;
    uint32_t compiled = 0; // pipelines that were not in the cache
  };
  virtual Cache cache() const = 0;
};

} // namespace lapilli::hal
