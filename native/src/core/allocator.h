// Device memory in pieces of larger chunks, kept for later use when a piece is given back: for tensors that come and go.
#pragma once

#include "core/memory.h"

#include <deque>
#include <memory>

namespace lapilli {

// Not thread-safe. A piece that is given back may be handed out again at once, while the device still works on it: the
// caller keeps its work in order.
class Allocator {
public:
  struct Chunk;
  struct Block { // a piece of a chunk
    Chunk* chunk = nullptr;
    uint64_t offset = 0, size = 0;
    Block *before = nullptr, *after = nullptr;  // neighbours in the chunk
    Block *previous = nullptr, *next = nullptr; // in the list of free blocks of about this size
    bool free = false;

    Region region() const;
    bool is_readable() const; // see hal::Buffer
    bool is_adopted() const;
    hal::SharedMemory share(hal::Handle kind) const;
  };

  // `alignment`: of the blocks, a power of two.
  Allocator(hal::Device& device, uint64_t alignment);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Null when the driver gives no more memory, or the limit is reached.
  Block* allocate(uint64_t bytes);
  // A block of a buffer that is shared with others: it is of no pool, and goes when it is released.
  Block* adopt(std::unique_ptr<hal::Buffer> buffer);
  void release(Block* block) noexcept; // an adopted one: once the device has finished with it

  // Gives chunks of which no piece is in use back to the driver. The device must have finished with them.
  void release_unused() noexcept;

  struct Sizes {
    uint64_t allocated = 0, peak_allocated = 0; // bytes in blocks
    uint64_t reserved = 0;                      // bytes in chunks
    uint64_t limit = UINT64_MAX;                // of reserved
  };
  Sizes sizes;
  uint64_t chunks() const { return chunks_.size(); }

private:
  // Free blocks by size: by the highest bit, and the three bits below it.
  static constexpr uint32_t steps = 8, classes = 64 * steps;
  struct Pool {
    std::array<Block*, classes> free{};
    std::array<uint8_t, 64> filled{}; // which of the lists have blocks
    uint64_t chunk;                   // bytes of a chunk
    uint64_t smallest_rest;           // what is less stays with the block that it was cut from
  };

  Pool& pool_for(uint64_t size);
  Block* find(Pool& pool, uint64_t size) const;
  Block* grow(Pool& pool, uint64_t size);
  Block* add_chunk(Pool& pool, uint64_t size);
  void insert(Pool& pool, Block* block);
  void remove(Pool& pool, Block* block);
  void absorb_next(Block* block); // the free neighbour after it becomes part of it
  Block* node();
  void give_back(Block* block) { block->next = std::exchange(spare_, block); }

  hal::Device& device_;
  const uint64_t alignment_;
  MemoryCounter counter_;
  Pool small_{}, large_{};
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::deque<Block> nodes_;
  Block* spare_ = nullptr; // of nodes_, not in use
};

struct Allocator::Chunk {
  GpuBuffer buffer;
  Pool* pool; // null: adopted
  Block* first;
};

} // namespace lapilli
