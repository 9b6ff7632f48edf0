#include "core/stream.h"

#include "base/error.h"
#include "base/json.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

namespace {

constexpr size_t most_in_flight = 32; // batches
// A batch is submitted when it has so many commands, or does so much; sooner when the device has nothing else to do: then
// after so many, and twice as many each further time it is found idle, for the host is the slower one, and a submission
// takes it as long as some commands do.
constexpr uint32_t commands_of_a_batch = 128, commands_for_idle = 8;
constexpr uint64_t work_of_a_batch = uint64_t{256} << 20, work_for_idle = uint64_t{1} << 20;
constexpr uint32_t most_patience = 8;
constexpr size_t most_accesses = 128; // to search before a barrier is cheaper
constexpr uint64_t staging_size = uint64_t{4} << 20, readback_size = uint64_t{4} << 20;

constexpr hal::Stage work_stage = hal::compute | hal::Stage::transfer_read | hal::Stage::transfer_write;

} // namespace

std::shared_ptr<Stream> Stream::create(std::shared_ptr<hal::Device> device) {
  return std::shared_ptr<Stream>(new Stream(std::move(device)));
}

Stream::Stream(std::shared_ptr<hal::Device> device)
    : device_(std::move(device)), alignment_(binding_alignment(device_->capabilities)),
      paths_(choose_paths(device_->capabilities)), allocator_(*device_, alignment_), batches_(most_in_flight + 1) {}

Stream::~Stream() {
  try {
    submit();
  } catch (...) { // nobody can see that it does not take place, but in states
    if (recording_)
      for (const auto& program : batch(in_flight_).programs())
        program->lose_states();
  }
  try {
    wait_until_in_flight(0);
  } catch (...) { // the device is lost: nothing runs any more
  }
}

void Stream::remember_loss(const char* why) noexcept {
  lost_ = true;
  try {
    lost_why_ = why;
  } catch (...) {
    return; // without words
  }
}

// One caller after the other, and none once the device or what was queued is lost.
template <class F> auto Stream::locked(F&& f) {
  const std::lock_guard lock(mutex_);
  if (device_->lost() && !lost_)
    remember_loss("The device of this stream stopped working. Make a new stream, which opens the device anew.");
  if (lost_)
    fail(LAPILLI_DEVICE_LOST,
         lost_why_.empty() ? "The device stopped working, or the machine is out of memory." : lost_why_);
  try {
    return f();
  } catch (const Error& error) {
    if (device_->lost() && !lost_) // and not a program's device, or its states
      remember_loss(error.what());
    throw;
  }
}

Allocator::Block* Stream::allocate(uint64_t bytes) {
  const hal::Capabilities& device = device_->capabilities;
  // On a software device texel buffers see a little more than their tensor (see resolve_binding).
  const uint64_t size = device.is_cpu() ? bytes + alignment_ : bytes;
  Allocator::Block* block = bytes <= device.max_allocation ? allocator_.allocate(size) : nullptr;
  if (block == nullptr && bytes <= device.max_allocation) {
    release_cache();
    block = allocator_.allocate(size);
  }
  if (block != nullptr)
    return block;
  const Allocator::Sizes& sizes = allocator_.sizes;
  fail(LAPILLI_OUT_OF_MEMORY, device.name, " has not enough memory for ", human_size(bytes), ": ",
       human_size(sizes.allocated), " are in use, ", human_size(sizes.reserved), " are taken from the driver, ",
       sizes.limit != UINT64_MAX ? cat("the limit that was set is ", human_size(sizes.limit), ", ") : std::string(),
       "the device has ", human_size(device.device_memory), " and allows ", human_size(device.max_allocation),
       " at once. Delete tensors that are not needed, run smaller inputs, or choose another device with "
       "LAPILLI_DEVICE.");
}

void Stream::release_cache() {
  submit();
  wait_until_in_flight(0);
  allocator_.release_unused();
}

lapilli_buffer* Stream::create_buffer(uint64_t bytes) {
  return locked([&] {
    std::unique_ptr<lapilli_buffer> buffer(new lapilli_buffer{shared_from_this(), nullptr, bytes});
    buffer->block = allocate(bytes);
    return buffer.release();
  });
}

void Stream::destroy(lapilli_buffer* buffer) noexcept {
  const std::lock_guard lock(mutex_);
  allocator_.release(buffer->block);
}

Region Stream::region(const lapilli_buffer& buffer, uint64_t offset, uint64_t bytes) const {
  if (buffer.stream.get() != this && buffer.stream->lost())
    fail(LAPILLI_DEVICE_LOST,
         "A buffer is of a stream whose work was lost, or whose device stopped working. What was in it "
         "is lost: make it anew.");
  if (buffer.stream.get() != this)
    fail(LAPILLI_INVALID_ARGUMENT, "The buffers belong to different streams. Allocate both from one, or copy through "
                                   "the host.");
  if (offset > buffer.bytes || bytes > buffer.bytes - offset)
    fail(LAPILLI_INVALID_ARGUMENT, "Bytes ", offset, " to ", offset + bytes, " were asked for of a buffer of ",
         buffer.bytes, ".");
  const Region whole = buffer.block->region();
  return {whole.buffer, whole.offset + offset, bytes};
}

// -- batches

// Where it throws, nothing of what the caller wants was recorded.
hal::Commands& Stream::record() {
  if (recording_ && batch(in_flight_).ended())
    submit(); // what could not be submitted when it was due
  if (!recording_) {
    let_go_of_finished();
    wait_until_in_flight(most_in_flight - 1);
    std::unique_ptr<Batch>& next = batches_[(oldest_ + in_flight_) % batches_.size()];
    if (!next)
      next = std::make_unique<Batch>(*device_);
    next->begin();
    recording_ = true;
    recorded_ = 0;
    work_ = 0;
    look_later();
    next->commands().barrier(work_stage, work_stage); // after what was submitted before
    accesses_.clear();
  }
  return batch(in_flight_).commands();
}

// Where it throws OUT_OF_MEMORY, what was recorded is kept, and submitted by a later call.
void Stream::submit() {
  if (!recording_)
    return;
  Batch& last = batch(in_flight_);
  if (!last.ended()) {
    last.commands().barrier(hal::Stage::compute_write | hal::Stage::transfer_write, hal::Stage::host_read);
    last.staged = staged_;
    try {
      last.end();
    } catch (const std::exception& error) {
      lose(error.what());
    }
  }
  last.submit();
  recording_ = false;
  ++in_flight_;
}

// The driver could not write the commands down, and what they are is nowhere else.
void Stream::lose(const char* why) {
  recording_ = false;
  lost_ = true;
  for (const auto& program : batch(in_flight_).programs())
    program->lose_states();
  const std::string text = cat("Work that was queued on this stream is lost, and its buffers hold anything: ", why,
                               " Then make a new stream and begin again.");
  remember_loss(text.c_str());
  fail(LAPILLI_DEVICE_LOST, text);
}

// The work of the call that this ends is queued, whether or not it can be submitted now.
void Stream::submit_if_due() {
  bool due = recorded_ >= commands_of_a_batch || work_ >= work_of_a_batch;
  if (!due && recorded_ < look_at_ && work_ < look_at_work_)
    return;
  if (!due) {
    let_go_of_finished();
    due = in_flight_ == 0;
    patience_ = due ? std::min(2 * patience_, most_patience)
                    : 1; // the host is ahead, and the next batch should be there when the device is ready
  }
  if (!due)
    return look_later();
  try {
    submit();
  } catch (const Error& error) {
    if (error.status != LAPILLI_OUT_OF_MEMORY)
      throw;
  } catch (const std::bad_alloc&) {
    if (lost_)
      throw;
  }
}

void Stream::look_later() {
  look_at_ = recorded_ + commands_for_idle * patience_;
  look_at_work_ = work_ + work_for_idle * patience_;
}

// False when the oldest batch in flight is not finished within `timeout` nanoseconds.
bool Stream::wait_for_oldest(uint64_t timeout) {
  if (!batch(0).wait(timeout))
    return false;
  if (timeout > 0)
    patience_ = 1; // what comes after a result was waited for should begin soon
  unstaged_ = batch(0).staged;
  oldest_ = (oldest_ + 1) % batches_.size();
  --in_flight_;
  return true;
}

void Stream::let_go_of_finished() {
  while (in_flight_ > 0 && wait_for_oldest(0)) {
  }
}

void Stream::wait_until_in_flight(size_t batches) {
  while (in_flight_ > batches)
    wait_for_oldest(hal::no_timeout);
}

void Stream::flush() {
  locked([&] { submit(); });
}

void Stream::synchronize() {
  locked([&] {
    submit();
    wait_until_in_flight(0);
  });
}

// -- barriers

bool Stream::conflicts(const Region& region, bool written) const {
  return std::ranges::any_of(accesses_, [&](const Access& earlier) {
    return (earlier.written || written) && overlap(earlier.region, region);
  });
}

// A barrier where what is accessed next depends on what was accessed before.
void Stream::wait_for(std::span<const Region> regions, size_t reads) {
  bool wait = accesses_.size() + regions.size() > most_accesses;
  for (size_t i = 0; i < regions.size() && !wait; ++i)
    wait = conflicts(regions[i], i >= reads);
  if (wait) {
    record().barrier(work_stage, work_stage);
    accesses_.clear();
  }
  for (size_t i = 0; i < regions.size(); ++i)
    accesses_.push_back({regions[i], i >= reads});
}

// -- copies

void Stream::copy(const Region& from, const Region& to) {
  record();
  wait_for(std::array{from, to}, 1);
  record().copy(from, to);
  ++recorded_;
  work_ += to.size;
}

void Stream::copy(const lapilli_buffer& from, uint64_t from_offset, const lapilli_buffer& to, uint64_t to_offset,
                  uint64_t bytes) {
  locked([&] {
    const Region source = region(from, from_offset, bytes), target = region(to, to_offset, bytes);
    if (bytes == 0)
      return;
    if (overlap(source, target))
      fail(LAPILLI_INVALID_ARGUMENT, "Bytes ", from_offset, " to ", from_offset + bytes, " of a buffer overlap with ",
           to_offset, " to ", to_offset + bytes, ", where they should be copied. Copy through another buffer.");
    copy(source, target);
    submit_if_due();
  });
}

void Stream::fill(const lapilli_buffer& buffer, uint64_t offset, uint64_t bytes, uint32_t pattern) {
  locked([&] {
    const Region target = region(buffer, offset, bytes);
    if (offset % 4 != 0 || bytes % 4 != 0)
      fail(LAPILLI_INVALID_ARGUMENT, "Buffers are filled by words of 4 bytes; offset ", offset, " and size ", bytes,
           " were given.");
    if (bytes == 0)
      return;
    record();
    wait_for(std::array{target}, 0);
    record().fill(target, pattern);
    ++recorded_;
    work_ += bytes;
    submit_if_due();
  });
}

// Where so many bytes can be written in the staging ring.
uint64_t Stream::stage(uint64_t bytes) {
  if (staging_.size() == 0)
    staging_ = GpuBuffer(*device_, staging_size, device_->capabilities.large_bar ? MemoryUse::bar : MemoryUse::upload,
                         counter_, "staging memory");
  uint64_t begin = staged_;
  if (begin % staging_size + bytes > staging_size) // not across its end
    begin = align_up(begin, staging_size);
  const uint64_t end = align_up(begin + bytes, 16);
  while (end - unstaged_ > staging_size) {
    if (in_flight_ == 0)
      submit();
    if (in_flight_ == 0)
      unstaged_ = begin; // nothing is in it
    else
      wait_for_oldest(hal::no_timeout);
  }
  staged_ = end;
  return begin % staging_size;
}

void Stream::write(const lapilli_buffer& buffer, uint64_t offset, Bytes data) {
  locked([&] {
    const Region target = region(buffer, offset, data.size());
    if (data.empty())
      return;
    let_go_of_finished();
    std::byte* mapped = buffer.block->mapped();
    if (mapped != nullptr && paths_.input != InputPath::staging && in_flight_ == 0 && !recording_) {
      std::memcpy(mapped + offset, data.data(), data.size()); // nothing else uses the memory
      return;
    }
    constexpr uint64_t piece = staging_size / 4;
    for (uint64_t done = 0; done < data.size(); done += piece) {
      const Bytes part = data.subspan(done, std::min(piece, data.size() - done));
      const uint64_t at = stage(part.size());
      std::memcpy(staging_.mapped() + at, part.data(), part.size());
      copy(staging_.region(at, part.size()), {target.buffer, target.offset + done, part.size()});
      submit_if_due();
    }
  });
}

void Stream::read(const lapilli_buffer& buffer, uint64_t offset, std::span<std::byte> data) {
  locked([&] {
    const Region source = region(buffer, offset, data.size());
    if (data.empty())
      return;
    if (buffer.block->is_readable() && paths_.output != OutputPath::staging) {
      submit();
      wait_until_in_flight(0);
      std::memcpy(data.data(), buffer.block->mapped() + offset, data.size());
      return;
    }
    if (readback_.size() == 0)
      readback_ = GpuBuffer(*device_, readback_size, MemoryUse::readback, counter_, "staging memory");
    // In two halves: the device fills one while the host reads the other.
    constexpr uint64_t half = readback_size / 2;
    for (uint64_t done = 0; done < data.size() + half; done += half) {
      if (done < data.size()) {
        const uint64_t size = std::min(half, data.size() - done);
        copy({source.buffer, source.offset + done, size}, readback_.region(done % readback_size, size));
        submit();
      }
      wait_until_in_flight(done < data.size() ? 1 : 0);
      if (done == 0)
        continue;
      const uint64_t last = done - half;
      readback_.invalidate();
      std::memcpy(data.data() + last, readback_.mapped() + last % readback_size, std::min(half, data.size() - last));
    }
  });
}

// -- runs

void Stream::enqueue(const std::shared_ptr<Program>& program, uint32_t method, std::span<const int64_t> symbols,
                     size_t inputs, std::span<const lapilli_slice> slices) {
  program->leave_other_streams(*this);
  locked([&] {
    if (program->device().lost())
      fail(LAPILLI_DEVICE_LOST, "The device stopped working after this program was loaded. Load the program again.");
    if (&program->device() != device_.get())
      fail(LAPILLI_INVALID_ARGUMENT, "The program is loaded on ", program->device().capabilities.name, " (device ",
           program->device().index, "), and the stream is of ", device_->capabilities.name, " (device ", device_->index,
           "). Load the program with the stream's device, and validation as it has.");
    {
      const Program::Launching launching = program->launch(method, symbols, *this);
      try {
        place(launching.launch, program->method(method), inputs, slices);
        record();
        if (program->is_new_to(batch(in_flight_).id())) {
          batch(in_flight_).keep(program);
          program->is_known_to(batch(in_flight_).id());
        }
        record(launching.launch, *program, inputs, slices.size() - inputs);
      } catch (...) {
        release_temporaries();
        throw;
      }
      release_temporaries();
    }
    submit_if_due();
  });
}

void Stream::release_temporaries() noexcept {
  for (const Temporary& temporary : temporaries_)
    allocator_.release(temporary.block);
  temporaries_.clear();
}

// Finds the memory of every slot of a run.
void Stream::place(const Launch& launch, const Method& method, size_t inputs, std::span<const lapilli_slice> slices) {
  if (inputs != method.inputs.size() || slices.size() - inputs != method.outputs.size())
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" has ", method.inputs.size(), " inputs and ",
         method.outputs.size(), " outputs", method.checks.empty() ? "" : " (the result of its checks is the last one)",
         ", and ", inputs, " and ", slices.size() - inputs, " were given.");
  slots_.clear();
  const auto name = [&](size_t i) {
    return i < inputs ? cat("Input ", i, " (", method.inputs[i].name, ")")
                      : cat("Output ", i - inputs, " (", method.outputs[i - inputs].name, ")");
  };
  const auto temporary = [&](uint64_t bytes, const Region& target) {
    temporaries_.reserve(temporaries_.size() + 1);
    Allocator::Block* block = allocate(bytes);
    temporaries_.push_back({block, target});
    const Region whole = block->region();
    slots_.push_back({whole.buffer, whole.offset, bytes});
  };
  for (size_t i = 0; i < slices.size(); ++i) {
    const Launch::Slot& slot = launch.slots[i];
    const auto& [buffer, offset] = slices[i];
    if (buffer != nullptr && buffer->stream.get() != this && buffer->stream->lost())
      fail(LAPILLI_DEVICE_LOST, name(i),
           " is a buffer of a stream whose work was lost, or whose device stopped working. "
           "What was in it is lost: make it anew.");
    if (buffer == nullptr || buffer->stream.get() != this)
      fail(LAPILLI_INVALID_ARGUMENT, name(i), " is not a buffer of this stream.");
    if (offset % alignment_ != 0)
      fail(LAPILLI_INVALID_ARGUMENT, name(i), " begins at byte ", offset, " of its buffer, and ",
           device_->capabilities.name, " wants multiples of ", alignment_, ". Copy it to the beginning of a buffer.");
    if (offset > buffer->bytes || slot.tensor > buffer->bytes - offset || slot.bound > buffer->block->size - offset)
      fail(LAPILLI_INVALID_ARGUMENT, name(i), " takes ", slot.tensor, " bytes, and the buffer has ",
           buffer->bytes - std::min(offset, buffer->bytes), " from byte ", offset, ".");
    const Region whole = buffer->block->region();
    const Region region{whole.buffer, whole.offset + offset, slot.bound};
    // What an input in the same memory needs of an output: the same place, and that no later command reads the input.
    const auto spoils = [&](size_t input) {
      const Region& other = slots_[input];
      return overlap(region, other) && (region.offset != other.offset || slot.tensor != launch.slots[input].tensor ||
                                        slot.first_written < launch.slots[input].last_read);
    };
    bool apart = i >= inputs && slot.bound != slot.tensor && slot.tensor != buffer->bytes - offset;
    for (size_t input = 0; i >= inputs && input < inputs && !apart; ++input)
      apart = spoils(input);
    if (apart)
      temporary(slot.bound, {region.buffer, region.offset, slot.tensor});
    else
      slots_.push_back(region);
  }
  for (const Launch::Slot& slot : std::span(launch.slots).subspan(slices.size()))
    temporary(slot.bound, {});
}

// First all that can fail, then the commands: half a run would be submitted with what comes next.
void Stream::record(const Launch& launch, const Program& program, size_t inputs, size_t outputs) {
  hal::Commands& commands = batch(in_flight_).commands();
  const Placed placed{launch, program.pipelines(), slots_};
  recorder_.prepare(commands, placed, 0, launch.commands.size());
  // What the plan says of barriers holds where inputs and outputs are apart.
  bool alias = false;
  for (size_t i = inputs; i < inputs + outputs; ++i)
    for (size_t j = 0; j < i; ++j)
      alias = alias || overlap(slots_[i], slots_[j]);
  const std::span<const Region> states = program.states().regions();
  slots_.insert(slots_.end(), states.begin(), states.end());
  accesses_.reserve(std::max(most_accesses, slots_.size()) + 2); // for these and for the copies at the end
  wait_for(slots_, inputs);
  recorder_.record(commands, {launch, program.pipelines(), slots_},
                   alias ? Recorder::Barriers::all : Recorder::Barriers::planned);
  recorded_ += static_cast<uint32_t>(launch.commands.size());
  work_ += launch.work;
  for (const Temporary& temporary : temporaries_)
    if (temporary.target.size > 0) {
      const Region block = temporary.block->region();
      copy({block.buffer, block.offset, temporary.target.size}, temporary.target);
    }
}

// -- memory

void Stream::empty_cache() {
  locked([&] { release_cache(); });
}

void Stream::set_memory_limit(uint64_t bytes) {
  locked([&] { allocator_.sizes.limit = bytes == 0 ? UINT64_MAX : bytes; });
}

void Stream::reset_peak_memory() {
  locked([&] { allocator_.sizes.peak_allocated = allocator_.sizes.allocated; });
}

lapilli_stream_memory_info Stream::memory() {
  const std::lock_guard lock(mutex_);
  const Allocator::Sizes& sizes = allocator_.sizes;
  return {sizes.allocated, sizes.peak_allocated, sizes.reserved, sizes.limit == UINT64_MAX ? 0 : sizes.limit,
          allocator_.chunks()};
}

std::string Stream::info() const {
  Json json;
  json.object([&] {
    json.key("device");
    hal::describe(device_->capabilities, device_->index, json);
    json.field("alignment", alignment_);
    json.field("max_allocation", device_->capabilities.max_allocation);
    json.field("memory", device_->capabilities.device_memory);
  });
  return json.text();
}

} // namespace lapilli
