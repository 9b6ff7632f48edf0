#include "core/stream.h"

#include "base/error.h"
#include "base/json.h"
#include "base/parallel.h"

#include <algorithm>
#include <cstring>

namespace lapilli {

namespace {

constexpr uint64_t staging_size = uint64_t{4} << 20, readback_size = uint64_t{4} << 20;
constexpr uint64_t staging_alignment = 16;

} // namespace

std::shared_ptr<Stream> Stream::create(std::shared_ptr<hal::Device> device) {
  return std::shared_ptr<Stream>(new Stream(std::move(device)));
}

Stream::Stream(std::shared_ptr<hal::Device> device)
    : device_(std::move(device)), alignment_(binding_alignment(device_->capabilities)),
      paths_(choose_paths(device_->capabilities)), allocator_(*device_, alignment_),
      staging_(*device_, staging_size, staging_alignment, counter_), batches_(*device_, hal::Stage::host_read) {}

Stream::~Stream() {
  try {
    batches_.submit();
  } catch (...) { // nobody can see that it does not take place, but in states
    batches_.drop();
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
  } catch (const std::exception& error) {
    if (batches_.lost())
      lose(error.what());
    if (device_->lost() && !lost_) // and not a program's device, or its states
      remember_loss(error.what());
    throw;
  }
}

// What was queued could not be written down.
void Stream::lose(const char* why) {
  lost_ = true;
  const std::string text = cat("Work that was queued on this stream is lost, and its buffers hold anything: ", why,
                               " Then make a new stream and begin again.");
  remember_loss(text.c_str());
  fail(LAPILLI_DEVICE_LOST, text);
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
  batches_.finish();
  allocator_.release_unused();
}

lapilli_buffer* Stream::create_buffer(uint64_t bytes) {
  return locked([&] {
    std::unique_ptr<lapilli_buffer> buffer(new lapilli_buffer{shared_from_this(), nullptr, bytes});
    buffer->block = allocate(bytes);
    return buffer.release();
  });
}

lapilli_buffer* Stream::create_shared(uint64_t bytes, hal::Handle kind) {
  return locked([&] {
    std::unique_ptr<lapilli_buffer> buffer(new lapilli_buffer{shared_from_this(), nullptr, bytes});
    // Room as create_buffer gives it.
    const uint64_t room = device_->capabilities.is_cpu() ? alignment_ : 0;
    if (bytes > device_->capabilities.max_allocation)
      fail(LAPILLI_OUT_OF_MEMORY, device_->capabilities.name, " allows ",
           human_size(device_->capabilities.max_allocation), " at once, and ", human_size(bytes), " were asked for.");
    auto memory = device_->create_shared(align_up(std::max<uint64_t>(bytes + room, 1), alignment_), kind);
    if (!memory)
      fail(LAPILLI_OUT_OF_MEMORY, device_->capabilities.name, " has not enough memory for ", human_size(bytes),
           " that others share. Delete tensors that are not needed, or choose another device with LAPILLI_DEVICE.");
    buffer->block = allocator_.adopt(std::move(memory));
    return buffer.release();
  });
}

lapilli_buffer* Stream::import(const hal::SharedMemory& memory, uint64_t bytes) {
  return locked([&] {
    if (bytes == 0 || memory.handle == 0)
      fail(LAPILLI_INVALID_ARGUMENT, "There is no memory to import: ", bytes, " bytes, with the handle ", memory.handle,
           ".");
    std::unique_ptr<lapilli_buffer> buffer(new lapilli_buffer{shared_from_this(), nullptr, bytes});
    buffer->block = allocator_.adopt(device_->import(memory, bytes));
    return buffer.release();
  });
}

hal::SharedMemory Stream::share(const lapilli_buffer& buffer, hal::Handle kind) {
  return locked([&] { return buffer.block->share(kind); });
}

void Stream::destroy(lapilli_buffer* buffer) noexcept {
  const std::lock_guard lock(mutex_);
  if (buffer->block->is_adopted())
    try { // its owner may take it back at once
      batches_.finish();
    } catch (...) { // the device is lost, and does nothing more
    }
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
  if (bytes == 0)
    offset = 0; // as in place()
  if (offset > buffer.bytes || bytes > buffer.bytes - offset)
    fail(LAPILLI_INVALID_ARGUMENT, "Bytes ", offset, " to ", offset + bytes, " were asked for of a buffer of ",
         buffer.bytes, ".");
  const Region whole = buffer.block->region();
  return {whole.buffer, whole.offset + offset, bytes};
}

void Stream::flush() {
  locked([&] { batches_.submit(); });
}

void Stream::synchronize() {
  locked([&] { batches_.finish(); });
}

// -- copies

void Stream::copy(const lapilli_buffer& from, uint64_t from_offset, const lapilli_buffer& to, uint64_t to_offset,
                  uint64_t bytes) {
  locked([&] {
    const Region source = region(from, from_offset, bytes), target = region(to, to_offset, bytes);
    if (bytes == 0)
      return;
    if (overlap(source, target))
      fail(LAPILLI_INVALID_ARGUMENT, "Bytes ", from_offset, " to ", from_offset + bytes, " of a buffer overlap with ",
           to_offset, " to ", to_offset + bytes, ", where they should be copied. Copy through another buffer.");
    batches_.record().copy(source, target);
    batches_.submit_if_due();
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
    batches_.record().fill(target, pattern);
    batches_.submit_if_due();
  });
}

void Stream::write(const lapilli_buffer& buffer, uint64_t offset, Bytes data) {
  locked([&] {
    const Region target = region(buffer, offset, data.size());
    if (data.empty())
      return;
    batches_.retire_finished();
    std::byte* const visible = mapped(target);
    if (visible != nullptr && paths_.input != InputPath::staging && batches_.in_flight() == 0 &&
        !batches_.recording()) {
      copy_bytes(visible, data.data(), data.size()); // nothing else uses the memory
      return;
    }
    staging_.upload(batches_, target, [&](std::span<std::byte> to, uint64_t done) {
      copy_bytes(to.data(), data.data() + done, to.size());
    });
  });
}

void Stream::read(const lapilli_buffer& buffer, uint64_t offset, std::span<std::byte> data) {
  locked([&] {
    const Region source = region(buffer, offset, data.size());
    if (data.empty())
      return;
    if (buffer.block->is_readable() && paths_.output != OutputPath::staging) {
      batches_.finish();
      copy_bytes(data.data(), mapped(source), data.size());
      return;
    }
    if (readback_.size() == 0)
      readback_ = GpuBuffer(*device_, readback_size, MemoryUse::readback, counter_, "staging memory");
    // In two halves: the device fills one while the host reads the other.
    constexpr uint64_t half = readback_size / 2;
    for (uint64_t done = 0; done < data.size() + half; done += half) {
      if (done < data.size()) {
        const uint64_t size = std::min(half, data.size() - done);
        batches_.record().copy({source.buffer, source.offset + done, size},
                               readback_.region(done % readback_size, size));
        batches_.submit();
      }
      batches_.wait_until_in_flight(done < data.size() ? 1 : 0);
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
        Batch& batch = batches_.record();
        if (program->is_new_to(batch.id())) {
          batch.keep(program);
          program->is_known_to(batch.id());
        }
        record(batch, launching.launch, *program, inputs, slices.size() - inputs);
      } catch (...) {
        release_temporaries();
        throw;
      }
      release_temporaries();
    }
    batches_.submit_if_due();
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
  const auto temporary = [&](uint64_t bytes, const Region& target, const Region& source) {
    temporaries_.reserve(temporaries_.size() + 1);
    Allocator::Block* block = allocate(bytes);
    temporaries_.push_back({block, target, source});
    const Region whole = block->region();
    slots_.push_back({whole.buffer, whole.offset, bytes});
  };
  for (size_t i = 0; i < slices.size(); ++i) {
    const Launch::Slot& slot = launch.slots[i];
    const auto& [buffer, begin] = slices[i];
    const uint64_t offset = slot.tensor == 0 ? 0 : begin; // nothing may begin anywhere, even beyond its buffer
    if (buffer != nullptr && buffer->stream.get() != this && buffer->stream->lost())
      fail(LAPILLI_DEVICE_LOST, name(i),
           " is a buffer of a stream whose work was lost, or whose device stopped working. "
           "What was in it is lost: make it anew.");
    if (buffer == nullptr || buffer->stream.get() != this)
      fail(LAPILLI_INVALID_ARGUMENT, name(i), " is not a buffer of this stream.");
    if (offset % alignment_ != 0)
      fail(LAPILLI_INVALID_ARGUMENT, name(i), " begins at byte ", offset, " of its buffer, and ",
           device_->capabilities.name, " wants multiples of ", alignment_, ". Copy it to the beginning of a buffer.");
    if (offset > buffer->bytes || slot.tensor > buffer->bytes - offset ||
        (slot.bound > buffer->block->size - offset && !buffer->block->is_adopted()))
      fail(LAPILLI_INVALID_ARGUMENT, name(i), " takes ", slot.tensor, " bytes, and the buffer has ",
           buffer->bytes - std::min(offset, buffer->bytes), " from byte ", offset, ".");
    const Region whole = buffer->block->region();
    const Region region{whole.buffer, whole.offset + offset, std::max(slot.bound, slot.reach)};
    // What an input in the same memory needs of an output: the same place, and that no later command reads the input.
    const auto spoils = [&](size_t input) {
      const Region& other = slots_[input];
      return overlap(region, other) && (region.offset != other.offset || slot.tensor != launch.slots[input].tensor ||
                                        slot.first_written < launch.slots[input].last_read);
    };
    // Memory of others has no room behind it.
    const bool cramped = region.size > buffer->block->size - offset;
    bool apart = cramped || (i >= inputs && slot.bound != slot.tensor && slot.tensor != buffer->bytes - offset);
    for (size_t input = 0; i >= inputs && input < inputs && !apart; ++input)
      apart = spoils(input);
    const Region exact{region.buffer, region.offset, slot.tensor};
    if (apart && i < inputs)
      temporary(region.size, {}, exact);
    else if (apart)
      temporary(region.size, exact, {});
    else
      slots_.push_back(region);
  }
  for (const Launch::Slot& slot : std::span(launch.slots).subspan(slices.size()))
    temporary(slot.bound, {}, {});
}

// First all that can fail, then the commands: half a run would be submitted with what comes next.
void Stream::record(Batch& batch, const Launch& launch, const Program& program, size_t inputs, size_t outputs) {
  recorder_.prepare(batch.commands(), {launch, program.pipelines(), slots_}, 0, launch.commands.size());
  for (const Temporary& temporary : temporaries_)
    if (temporary.source.size > 0) {
      const Region block = temporary.block->region();
      batch.copy(temporary.source, {block.buffer, block.offset, temporary.source.size});
    }
  // What the plan says of barriers holds where inputs and outputs are apart.
  bool alias = false;
  for (size_t i = inputs; i < inputs + outputs; ++i)
    for (size_t j = 0; j < i; ++j)
      alias = alias || overlap(slots_[i], slots_[j]);
  const std::span<const Region> states = program.states().regions();
  slots_.insert(slots_.end(), states.begin(), states.end());
  batch.wait_for(slots_, inputs);
  recorder_.record(batch.commands(), {launch, program.pipelines(), slots_},
                   alias ? Recorder::Barriers::all : Recorder::Barriers::planned);
  batch.count(launch.commands.size(), launch.work);
  for (const Temporary& temporary : temporaries_)
    if (temporary.target.size > 0) {
      const Region block = temporary.block->region();
      batch.copy({block.buffer, block.offset, temporary.target.size}, temporary.target);
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
