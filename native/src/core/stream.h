// Work on one device in order, recorded into command buffers that are submitted when it pays.
#pragma once

#include "core/allocator.h"
#include "core/batch.h"

namespace lapilli {
class Stream;
}

struct lapilli_buffer {
  std::shared_ptr<lapilli::Stream> stream;
  lapilli::Allocator::Block* block;
  uint64_t bytes; // asked for
};

namespace lapilli {

class Stream : public std::enable_shared_from_this<Stream> {
public:
  static std::shared_ptr<Stream> create(std::shared_ptr<hal::Device> device);
  ~Stream();

  lapilli_buffer* create_buffer(uint64_t bytes);
  void destroy(lapilli_buffer* buffer) noexcept;

  void write(const lapilli_buffer& buffer, uint64_t offset, Bytes data);
  void read(const lapilli_buffer& buffer, uint64_t offset, std::span<std::byte> data);
  void copy(const lapilli_buffer& from, uint64_t from_offset, const lapilli_buffer& to, uint64_t to_offset,
            uint64_t bytes);
  void fill(const lapilli_buffer& buffer, uint64_t offset, uint64_t bytes, uint32_t pattern);
  // `slices`: of the inputs, then of the outputs.
  void enqueue(const std::shared_ptr<Program>& program, uint32_t method, std::span<const int64_t> symbols,
               size_t inputs, std::span<const lapilli_slice> slices);

  void flush();
  void synchronize();
  void empty_cache();
  void set_memory_limit(uint64_t bytes);
  void reset_peak_memory();
  lapilli_stream_memory_info memory();
  bool lost() const { return lost_ || device_->lost(); } // what is in its buffers
  std::string info() const;

private:
  explicit Stream(std::shared_ptr<hal::Device> device);
  template <class F> auto locked(F&& f);

  Allocator::Block* allocate(uint64_t bytes);
  void release_cache();
  Region region(const lapilli_buffer& buffer, uint64_t offset, uint64_t bytes) const;

  // Batches: the oldest ones in flight, then the one that is recorded.
  hal::Commands& record();
  [[noreturn]] void lose(const char* why); // what is recorded
  void remember_loss(const char* why) noexcept;
  Batch& batch(size_t index) { return *batches_[(oldest_ + index) % batches_.size()]; }
  void submit();
  void submit_if_due();
  void look_later();
  bool wait_for_oldest(uint64_t timeout);
  void let_go_of_finished();
  void wait_until_in_flight(size_t batches);

  // What was read and written since the last barrier.
  struct Access {
    Region region;
    bool written;
  };
  bool conflicts(const Region& region, bool written) const;
  void wait_for(std::span<const Region> regions, size_t reads); // so many are read, and the others written
  void copy(const Region& from, const Region& to);

  uint64_t stage(uint64_t bytes);
  void place(const Launch& launch, const Method& method, size_t inputs, std::span<const lapilli_slice> slices);
  void record(const Launch& launch, const Program& program, size_t inputs, size_t outputs);
  void release_temporaries() noexcept;

  std::shared_ptr<hal::Device> device_;
  std::mutex mutex_;
  std::atomic<bool> lost_{false}; // the device, or work that was queued: tensors are not what they should be
  std::string lost_why_;
  const uint64_t alignment_;
  const Paths paths_; // whether the host may touch the buffers' memory, where it sees it
  Allocator allocator_;
  MemoryCounter counter_;
  GpuBuffer staging_, readback_;       // made when first needed
  uint64_t staged_ = 0, unstaged_ = 0; // bytes that ever went into the staging ring, and out of it

  std::vector<std::unique_ptr<Batch>> batches_; // a ring; made when first needed
  size_t oldest_ = 0, in_flight_ = 0;
  bool recording_ = false; // or what was recorded could not be submitted yet
  uint32_t recorded_ = 0;  // commands of the batch that is recorded
  uint64_t work_ = 0;      // about what they do; see Launch::work
  uint32_t look_at_ = 0;   // so many, or so much work: time to see whether the device is idle
  uint64_t look_at_work_ = 0;
  uint32_t patience_ = 1; // until then, in units of commands_for_idle and work_for_idle
  std::vector<Access> accesses_;

  // Of the run that is recorded now: where its slots are.
  struct Temporary {
    Allocator::Block* block;
    Region target; // where an output is copied afterwards; of size 0 for a block of the arena
  };
  std::vector<Region> slots_;
  std::vector<Temporary> temporaries_;
  Recorder recorder_;
};

} // namespace lapilli
