// A device without a driver, for tests: buffers are memory of the host, copies and fills take place when they are submitted, and
// kernels do nothing but what a test says. Everything that is submitted can be read.
#pragma once

#include "hal/device.h"

#include <deque>
#include <functional>

namespace lapilli::null {

// A command as it was recorded.
struct Command {
  enum class Kind { barrier, copy, fill, dispatch, timestamp };
  Kind kind;
  hal::Stage before{}, after{}; // of a barrier
  hal::Region from{}, to{};     // of a copy; `to` of a fill
  uint32_t word = 0;            // of a fill; the index of a timestamp
  uint32_t kernel = 0;          // of a dispatch, and the rest
  std::vector<hal::Region> bindings{};
  std::vector<uint32_t> params{};
  std::array<uint32_t, 3> groups{};
};

class Buffer final : public hal::Buffer {
public:
  Buffer(uint64_t bytes, bool is_mapped, uint64_t& counted);
  explicit Buffer(std::byte* memory, uint64_t bytes, uint64_t& counted); // of somebody else
  ~Buffer() override;
  void invalidate() const override {}
  hal::SharedMemory share(hal::Handle kind) const override;
  std::byte* data() const { return data_; } // whether or not it is mapped

private:
  const std::unique_ptr<std::byte[]> own_;
  std::byte* const data_;
  uint64_t& counted_;
};

// Where the part of a buffer lies.
template <class T> T* data_of(const hal::Region& region) {
  return reinterpret_cast<T*>(static_cast<const Buffer*>(region.buffer)->data() + region.offset);
}

// What a portable GPU with 1 GiB of memory that the host does not see would say.
hal::Capabilities discrete_gpu();
// The same with memory that it shares with the host.
hal::Capabilities integrated_gpu();

class Device final : public hal::Device {
public:
  explicit Device(hal::Capabilities what);

  std::unique_ptr<hal::Buffer> create_buffer(uint64_t bytes, hal::MemoryUse use, uint64_t& most) override;
  std::unique_ptr<hal::Buffer> create_shared(uint64_t bytes, hal::Handle kind) override;
  std::unique_ptr<hal::Buffer> import(const hal::SharedMemory& memory, uint64_t bytes) override;
  std::unique_ptr<hal::Pipelines> compile(std::span<const Kernel> kernels, const std::vector<bool>& used,
                                          const std::string& cache_folder) override;
  std::unique_ptr<hal::Commands> create_commands(hal::Order order) override;
  std::unique_ptr<hal::Timestamps> create_timestamps(uint32_t count) override;
  void lose() { lost_ = true; }
  void execute(const std::vector<Command>& commands) const;

  std::vector<std::vector<Command>> submitted;  // a list for each submission
  std::function<void(const Command&)> kernel;   // what a dispatch does
  bool uses_sets = false;                       // of pipelines that are compiled from now on
  bool holds = false;                           // what is submitted does not take place before somebody waits for ever
  std::deque<const std::vector<Command>*> held; // that have not taken place
  uint64_t taken = 0, most_taken = 0;           // bytes of the buffers that there are, and the most that there were

private:
  const hal::Capabilities capabilities_;
};

} // namespace lapilli::null
