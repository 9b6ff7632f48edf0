// Work on one device in order: runs of programs and copies between buffers, which it hands out.
#pragma once

#include "core/allocator.h"
#include "core/program.h"
#include "core/staging.h"

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
  // Memory that others can be told of, and memory of others.
  lapilli_buffer* create_shared(uint64_t bytes, hal::Handle kind);
  lapilli_buffer* import(const hal::SharedMemory& memory, uint64_t bytes);
  hal::SharedMemory share(const lapilli_buffer& buffer, hal::Handle kind);
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
  bool lost() const { return lost_ || batches_.lost() || device_->lost(); } // what is in its buffers
  std::string info() const;
  const hal::Device& device() const { return *device_; }

private:
  explicit Stream(std::shared_ptr<hal::Device> device);
  template <class F> auto locked(F&& f);

  Allocator::Block* allocate(uint64_t bytes);
  void release_cache();
  Region region(const lapilli_buffer& buffer, uint64_t offset, uint64_t bytes) const;

  [[noreturn]] void lose(const char* why);
  void remember_loss(const char* why) noexcept;
  void place(const Launch& launch, const Method& method, size_t inputs, std::span<const lapilli_slice> slices);
  void record(Batch& batch, const Launch& launch, const Program& program, size_t inputs, size_t outputs);
  void release_temporaries() noexcept;

  std::shared_ptr<hal::Device> device_;
  std::mutex mutex_;
  std::atomic<bool> lost_{false}; // the device, or work that was queued: tensors are not what they should be
  std::string lost_why_;
  const uint64_t alignment_;
  const Paths paths_; // whether the host may touch the buffers' memory, where it sees it
  Allocator allocator_;
  MemoryCounter counter_;
  Staging staging_;
  GpuBuffer readback_; // made when first needed

  // Of the run that is recorded now: where its slots are.
  struct Temporary {
    Allocator::Block* block;
    Region target; // where an output is copied afterwards; of size 0 for a block of the arena
    Region source; // where an input is copied from before
  };
  std::vector<Region> slots_;
  std::vector<Temporary> temporaries_;
  Recorder recorder_;
  Batches batches_; // the last one: what they use goes after them
};

} // namespace lapilli
