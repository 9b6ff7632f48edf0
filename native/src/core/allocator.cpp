#include "core/allocator.h"

#include "base/error.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace lapilli {

namespace {

constexpr uint64_t mebi = uint64_t{1} << 20;
constexpr uint64_t largest_small = mebi;       // of the first pool, so that small blocks do not cut the large ones up
constexpr uint64_t largest_shared = 16 * mebi; // what is larger gets a chunk of its own
constexpr uint64_t own_chunk_step = 2 * mebi;

// The class of blocks of this size.
uint32_t class_of(uint64_t size) {
  const auto bit = static_cast<uint32_t>(std::bit_width(size)) - 1;
  return bit * 8 + static_cast<uint32_t>(size >> (bit - 3) & 7); // sizes are multiples of 256 at least
}

} // namespace

Region Allocator::Block::region() const { return chunk->buffer.region(offset, size); }

bool Allocator::Block::is_readable() const { return chunk->buffer.is_readable(); }

bool Allocator::Block::is_adopted() const { return chunk->pool == nullptr; }

hal::SharedMemory Allocator::Block::share(hal::Handle kind) const {
  hal::SharedMemory shared = chunk->buffer.share(kind);
  shared.offset += offset;
  return shared;
}

Allocator::Allocator(hal::Device& device, uint64_t alignment) : device_(device), alignment_(alignment) {
  small_.chunk = 8 * mebi;
  small_.smallest_rest = alignment;
  large_.chunk = 32 * mebi;
  large_.smallest_rest = largest_small;
}

Allocator::~Allocator() = default;

Allocator::Pool& Allocator::pool_for(uint64_t size) { return size <= largest_small ? small_ : large_; }

Allocator::Block* Allocator::allocate(uint64_t bytes) {
  if (bytes > device_.capabilities.max_allocation)
    return nullptr;
  const uint64_t size = align_up(std::max<uint64_t>(bytes, 1), alignment_);
  Pool& pool = pool_for(size);
  Block* block = find(pool, size);
  if (block == nullptr)
    block = grow(pool, size);
  if (block == nullptr)
    return nullptr;
  if (block->size - size >= pool.smallest_rest) {
    Block* rest = node();
    *rest = {block->chunk, block->offset + size, block->size - size, block, block->after};
    if (rest->after != nullptr)
      rest->after->before = rest;
    remove(pool, block);
    block->after = rest;
    block->size = size;
    insert(pool, rest);
  } else {
    remove(pool, block);
  }
  sizes.allocated += block->size;
  sizes.peak_allocated = std::max(sizes.peak_allocated, sizes.allocated);
  return block;
}

// Of the blocks of its own class one may be large enough; every block of a higher class is.
Allocator::Block* Allocator::find(Pool& pool, uint64_t size) const {
  const uint32_t wanted = class_of(size);
  constexpr int tries = 16;
  Block* block = pool.free[wanted];
  for (int i = 0; block != nullptr && i < tries; ++i, block = block->next)
    if (block->size >= size)
      return block;
  uint32_t row = wanted / steps;
  uint32_t filled = pool.filled[row] & ~((2u << wanted % steps) - 1);
  while (filled == 0) {
    if (++row == pool.filled.size())
      return nullptr;
    filled = pool.filled[row];
  }
  return pool.free[row * steps + static_cast<uint32_t>(std::countr_zero(filled))];
}

Allocator::Block* Allocator::grow(Pool& pool, uint64_t size) {
  const uint64_t shared = std::min(pool.chunk, device_.capabilities.max_allocation / alignment_ * alignment_);
  const uint64_t wanted = size > largest_shared ? align_up(size, own_chunk_step) : std::max(size, shared);
  Block* block = add_chunk(pool, wanted);
  if (block == nullptr && wanted > size)
    block = add_chunk(pool, size);
  return block;
}

Allocator::Block* Allocator::add_chunk(Pool& pool, uint64_t size) {
  // Some drivers give more than there is, and the machine becomes slow or ends the process.
  const uint64_t limit = std::min(sizes.limit, device_.capabilities.device_memory);
  if (size > limit || sizes.reserved > limit - size)
    return nullptr;
  auto chunk = std::make_unique<Chunk>();
  try {
    chunk->buffer = GpuBuffer(device_, size, MemoryUse::device, counter_, "tensors");
  } catch (const Error& error) {
    if (error.status != LAPILLI_OUT_OF_MEMORY)
      throw;
    return nullptr;
  }
  chunk->pool = &pool;
  Block* block = chunk->first = node();
  *block = {chunk.get(), 0, size};
  chunks_.push_back(std::move(chunk));
  sizes.reserved += size;
  insert(pool, block);
  return block;
}

Allocator::Block* Allocator::adopt(std::unique_ptr<hal::Buffer> buffer) {
  auto chunk = std::make_unique<Chunk>();
  chunks_.reserve(chunks_.size() + 1);
  Block* block = chunk->first = node();
  chunk->pool = nullptr;
  chunk->buffer = GpuBuffer(std::move(buffer), counter_);
  *block = {chunk.get(), 0, chunk->buffer.size()};
  sizes.allocated += block->size;
  sizes.peak_allocated = std::max(sizes.peak_allocated, sizes.allocated);
  chunks_.push_back(std::move(chunk));
  return block;
}

void Allocator::release(Block* block) noexcept {
  sizes.allocated -= block->size;
  if (block->is_adopted()) {
    std::erase_if(chunks_, [&](const std::unique_ptr<Chunk>& chunk) { return chunk.get() == block->chunk; });
    give_back(block);
    return;
  }
  Pool& pool = *block->chunk->pool;
  if (block->after != nullptr && block->after->free) {
    remove(pool, block->after);
    absorb_next(block);
  }
  if (block->before != nullptr && block->before->free) {
    block = block->before;
    remove(pool, block);
    absorb_next(block);
  }
  insert(pool, block);
}

void Allocator::absorb_next(Block* block) {
  Block* next = block->after;
  block->size += next->size;
  block->after = next->after;
  if (block->after != nullptr)
    block->after->before = block;
  give_back(next);
}

void Allocator::release_unused() noexcept {
  std::erase_if(chunks_, [&](const std::unique_ptr<Chunk>& chunk) {
    Block* first = chunk->first;
    if (!first->free || first->after != nullptr)
      return false;
    remove(*chunk->pool, first);
    sizes.reserved -= first->size;
    give_back(first);
    return true;
  });
}

void Allocator::insert(Pool& pool, Block* block) {
  const uint32_t index = class_of(block->size);
  block->free = true;
  block->previous = nullptr;
  block->next = std::exchange(pool.free[index], block);
  if (block->next != nullptr)
    block->next->previous = block;
  pool.filled[index / steps] = static_cast<uint8_t>(pool.filled[index / steps] | 1u << index % steps);
}

void Allocator::remove(Pool& pool, Block* block) {
  const uint32_t index = class_of(block->size);
  block->free = false;
  if (block->next != nullptr)
    block->next->previous = block->previous;
  if (block->previous != nullptr)
    block->previous->next = block->next;
  else if ((pool.free[index] = block->next) == nullptr)
    pool.filled[index / steps] = static_cast<uint8_t>(pool.filled[index / steps] & ~(1u << index % steps));
}

Allocator::Block* Allocator::node() {
  if (spare_ == nullptr)
    give_back(&nodes_.emplace_back());
  return std::exchange(spare_, spare_->next);
}

} // namespace lapilli
