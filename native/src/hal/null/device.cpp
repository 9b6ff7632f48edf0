#include "hal/null/device.h"

#include "base/error.h"

#include <algorithm>
#include <cstring>

namespace lapilli::null {

namespace {

struct Pipeline final : hal::Pipeline {
  uint32_t kernel = 0;
};

class Pipelines final : public hal::Pipelines {
public:
  Pipelines(size_t count, const std::vector<bool>& used, bool sets) : pipelines_(count) {
    for (uint32_t i = 0; i < count; ++i) {
      pipelines_[i].kernel = i;
      pipelines_[i].uses_sets = sets;
      compiled_ += used[i] ? 1 : 0;
    }
  }
  void finish() override {}
  const hal::Pipeline& operator[](uint32_t kernel) const override { return pipelines_[kernel]; }
  Cache cache() const override { return {{}, false, compiled_}; }

private:
  std::vector<Pipeline> pipelines_;
  uint32_t compiled_ = 0;
};

class Commands final : public hal::Commands {
public:
  explicit Commands(Device& device) : device_(device) {}
  ~Commands() override { std::erase(device_.held, &commands_); }

  void begin() override {
    release();
    commands_.clear();
  }
  void end() override {}
  void submit() override;
  bool wait(uint64_t timeout) override;
  void release() noexcept override { sets_.clear(); }

  void barrier(hal::Stage from, hal::Stage to) override {
    Command& command = add(Command::Kind::barrier);
    command.before = from;
    command.after = to;
  }
  void copy(const hal::Region& from, const hal::Region& to) override {
    Command& command = add(Command::Kind::copy);
    command.from = from;
    command.to = to;
  }
  void fill(const hal::Region& to, uint32_t word) override {
    Command& command = add(Command::Kind::fill);
    command.to = to;
    command.word = word;
  }
  Set prepare(const hal::Pipeline&, std::span<const hal::Region> bindings) override {
    sets_.emplace_back(bindings.begin(), bindings.end());
    return reinterpret_cast<Set>(sets_.size()); // the number of the set, from 1
  }
  void dispatch(const hal::Pipeline& pipeline, Set set, std::span<const hal::Region> bindings,
                std::span<const uint32_t> params, const std::array<uint32_t, 3>& groups) override {
    Command& command = add(Command::Kind::dispatch);
    command.kernel = static_cast<const Pipeline&>(pipeline).kernel;
    if (pipeline.uses_sets)
      command.bindings = sets_.at(reinterpret_cast<uintptr_t>(set) - 1);
    else
      command.bindings.assign(bindings.begin(), bindings.end());
    command.params.assign(params.begin(), params.end());
    command.groups = groups;
  }
  void timestamp(uint32_t index) { add(Command::Kind::timestamp).word = index; }

private:
  void finish();
  Command& add(Command::Kind kind) {
    commands_.push_back({kind});
    return commands_.back();
  }

  Device& device_;
  std::vector<Command> commands_;
  std::vector<std::vector<hal::Region>> sets_;
  bool in_flight_ = false;
};

void Commands::submit() {
  if (device_.lost())
    fail(LAPILLI_DEVICE_LOST, "The device stopped working.");
  device_.submitted.push_back(commands_);
  device_.held.push_back(&commands_);
  if (!device_.holds)
    finish();
  in_flight_ = true;
}

// What was submitted, and all before it.
void Commands::finish() {
  while (std::ranges::find(device_.held, &commands_) != device_.held.end()) {
    device_.execute(*device_.held.front());
    device_.held.pop_front();
  }
}

bool Commands::wait(uint64_t timeout) {
  if (device_.lost())
    fail(LAPILLI_DEVICE_LOST, "The device stopped working.");
  if (in_flight_ && device_.holds && timeout != hal::no_timeout)
    return false;
  finish();
  in_flight_ = false;
  return true;
}

class Timestamps final : public hal::Timestamps {
public:
  explicit Timestamps(uint32_t count) : ticks_(count) {}
  void reset(hal::Commands&) override {}
  void write(hal::Commands& commands, uint32_t index) override {
    static_cast<Commands&>(commands).timestamp(index);
    ticks_[index] = next_ += 10;
  }
  std::vector<uint64_t> ticks() override { return ticks_; }

private:
  std::vector<uint64_t> ticks_;
  uint64_t next_ = 0;
};

} // namespace

Buffer::Buffer(uint64_t bytes, bool is_mapped, uint64_t& counted)
    : hal::Buffer(bytes), own_(new std::byte[bytes]), data_(own_.get()), counted_(counted) {
  mapped_ = is_mapped ? data_ : nullptr;
  cached_ = is_mapped;
  counted_ += bytes;
}

Buffer::Buffer(std::byte* memory, uint64_t bytes, uint64_t& counted)
    : hal::Buffer(bytes), data_(memory), counted_(counted) {
  mapped_ = memory;
  cached_ = true;
  counted_ += bytes;
}

hal::SharedMemory Buffer::share(hal::Handle kind) const {
  if (kind != hal::Handle::host_pointer)
    fail(LAPILLI_UNSUPPORTED, "A device of the host's memory shares nothing else.");
  return {kind, reinterpret_cast<intptr_t>(data_), size_, 0};
}

Buffer::~Buffer() { counted_ -= size_; }

hal::Capabilities discrete_gpu() {
  hal::Capabilities result;
  result.name = "Null";
  result.type = hal::DeviceType::discrete;
  result.api = "null";
  result.api_version = "1.0.0";
  result.driver = "none";
  hal::DeviceLimits& limits = result.limits;
  limits.max_workgroup_invocations = 128;
  limits.max_workgroup_size = {128, 128, 64};
  limits.max_workgroup_count = {65535, 65535, 65535};
  limits.shared_memory = 16384;
  limits.push_constants = 128;
  limits.storage_buffers = 16;
  limits.texel_buffers = 16;
  limits.storage_range = uint64_t{1} << 27;
  limits.storage_alignment = limits.texel_alignment = 64;
  limits.texel_elements = 65536;
  result.device_memory = result.max_allocation = uint64_t{1} << 30;
  result.all_memory = uint64_t{2} << 30;
  result.subgroup_size = result.min_subgroup_size = result.max_subgroup_size = 32;
  result.spirv_minor = 6;
  result.queue_count = 1;
  result.timestamp_bits = 64;
  result.timestamp_period = 1;
  return result;
}

hal::Capabilities integrated_gpu() {
  hal::Capabilities result = discrete_gpu();
  result.type = hal::DeviceType::integrated;
  return result;
}

Device::Device(hal::Capabilities what) : hal::Device(capabilities_, 0), capabilities_(std::move(what)) {}

std::unique_ptr<hal::Buffer> Device::create_buffer(uint64_t bytes, hal::MemoryUse use, uint64_t& most) {
  most = 0;
  if (bytes > capabilities.all_memory - taken)
    return nullptr;
  most_taken = std::max(most_taken, taken + bytes);
  return std::make_unique<Buffer>(bytes, use != hal::MemoryUse::device || !capabilities.is_discrete(), taken);
}

std::unique_ptr<hal::Buffer> Device::create_shared(uint64_t, hal::Handle) {
  fail(LAPILLI_UNSUPPORTED, "A device of the host's memory shares nothing else.");
}

std::unique_ptr<hal::Buffer> Device::import(const hal::SharedMemory& memory, uint64_t bytes) {
  if (memory.kind != hal::Handle::host_pointer)
    fail(LAPILLI_UNSUPPORTED, "A device of the host's memory shares nothing else.");
  return std::make_unique<Buffer>(reinterpret_cast<std::byte*>(memory.handle), bytes, taken);
}

void Device::execute(const std::vector<Command>& commands) const {
  for (const Command& command : commands) {
    if (command.kind == Command::Kind::copy)
      std::memcpy(data_of<std::byte>(command.to), data_of<std::byte>(command.from), command.to.size);
    else if (command.kind == Command::Kind::fill)
      std::fill_n(data_of<uint32_t>(command.to), command.to.size / 4, command.word);
    else if (command.kind == Command::Kind::dispatch && kernel)
      kernel(command);
  }
}

std::unique_ptr<hal::Pipelines> Device::compile(std::span<const Kernel> kernels, const std::vector<bool>& used,
                                                const std::string&) {
  return std::make_unique<Pipelines>(kernels.size(), used, uses_sets);
}

std::unique_ptr<hal::Commands> Device::create_commands(hal::Order) { return std::make_unique<Commands>(*this); }

std::unique_ptr<hal::Timestamps> Device::create_timestamps(uint32_t count) {
  return std::make_unique<Timestamps>(count);
}

} // namespace lapilli::null
