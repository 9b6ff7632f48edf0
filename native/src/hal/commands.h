// What a device is told to do: recorded, submitted once or again and again, and waited for.
#pragma once

#include "hal/buffer.h"
#include "hal/pipelines.h"

#include <array>
#include <span>
#include <vector>

namespace lapilli::hal {

// What a barrier is between: kinds of access, which can be joined.
enum class Stage : uint32_t {
  host_write = 1,
  host_read = 2,
  compute_read = 4,
  compute_write = 8,
  transfer_read = 16,
  transfer_write = 32,
  everything = 64, // all that is recorded, whatever it accesses
};
constexpr Stage operator|(Stage a, Stage b) {
  return static_cast<Stage>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}
inline constexpr Stage compute = Stage::compute_read | Stage::compute_write;

inline constexpr uint64_t no_timeout = UINT64_MAX;

class Commands {
public:
  using Set = struct SetHandle*; // of buffers that are bound together; it lives until begin() or release()

  virtual ~Commands() = default;
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  virtual void begin() = 0; // what was recorded before goes; the device must have finished it
  virtual void end() = 0;   // throws OUT_OF_MEMORY where what was recorded is lost
  // Once ended, each time the device is finished; throws OUT_OF_MEMORY where it may be submitted again.
  virtual void submit() = 0;
  // False: not finished within so many nanoseconds. What the commands use may go when this has returned true, or has thrown:
  // then the device is lost.
  virtual bool wait(uint64_t timeout) = 0;
  virtual void release() noexcept = 0; // the sets, when the commands will not be submitted again

  virtual void barrier(Stage from, Stage to) = 0;
  virtual void copy(const Region& from, const Region& to) = 0; // as many bytes as `to` has
  virtual void fill(const Region& to, uint32_t word) = 0;      // multiples of 4 bytes
  // For a pipeline that uses sets: binds these parts of buffers, one a binding of its kernel. Records nothing, so that all that
  // can fail of several commands is done before the first of them is recorded.
  virtual Set prepare(const Pipeline& pipeline, std::span<const Region> bindings) = 0;
  // `set`: of prepare() where the pipeline uses sets; otherwise `bindings` are bound.
  virtual void dispatch(const Pipeline& pipeline, Set set, std::span<const Region> bindings,
                        std::span<const uint32_t> params, const std::array<uint32_t, 3>& groups) = 0;

  void submit_and_wait() {
    submit();
    wait(no_timeout);
  }

protected:
  Commands() = default;
};

// Points of time between commands.
class Timestamps {
public:
  virtual ~Timestamps() = default;
  virtual void reset(Commands& commands) = 0;                 // before the first of them is written
  virtual void write(Commands& commands, uint32_t index) = 0; // when all earlier commands have finished
  virtual std::vector<uint64_t> ticks() = 0; // of Capabilities::timestamp_period, when they have been written
};

} // namespace lapilli::hal
