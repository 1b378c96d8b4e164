// SPDX-License-Identifier: Apache-2.0
#include "optimized/memory/arena.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include <fmt/format.h>

namespace tandem {
namespace {

constexpr std::int64_t kCountedUnit = 64;
constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;
// A new chunk is as large as all before it together, up to this: few system calls for a large model, little slack for a small
// one.
constexpr std::int64_t kLargestGrowthBytes = std::int64_t{256} << 20;
constexpr std::int64_t kSmallPageBytes = 4096;
constexpr std::uint8_t kPoisonByte = 0xFF;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Arena::Buffer::Buffer(Buffer&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      chunk_(other.chunk_),
      offset_(other.offset_) {}

Arena::Buffer& Arena::Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  arena_ = std::exchange(other.arena_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  chunk_ = other.chunk_;
  offset_ = other.offset_;
  return *this;
}

void Arena::Buffer::release() noexcept {
  if (arena_ != nullptr) arena_->give_back(*this);
  arena_ = nullptr;
  data_ = nullptr;
  size_bytes_ = 0;
}

TensorView Arena::Buffer::view(DType dtype, const Shape& shape) const {
  const std::int64_t needed = num_elements(shape) * static_cast<std::int64_t>(tandem::size_bytes(dtype));
  TANDEM_CHECK(data_ != nullptr, "view of an empty buffer");
  TANDEM_CHECK(needed <= size_bytes_,
               fmt::format("{} of {} needs {} bytes, the buffer has {}", to_string(shape), name(dtype), needed, size_bytes_));
  return TensorView(data_, dtype, shape);
}

Arena::Arena(const ArenaOptions& options) : options_(options) {
  if (!on_host()) return;
  // With "never", madvise() still succeeds and changes nothing.
  std::string setting;
  if (std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled"); file) std::getline(file, setting);
  if (options_.huge_pages && setting.find("[never]") != std::string::npos) {
    notes_.push_back(
        "no huge pages: switched off in /sys/kernel/mm/transparent_hugepage; the first touch of memory will be slow");
  }
}

Arena::~Arena() {
  watch({});
  for (const Chunk& chunk : chunks_) {
    if (chunk.mapping == nullptr) {
      options_.memory->give_back(chunk.data, chunk.size_bytes);
      continue;
    }
    ASAN_UNPOISON_MEMORY_REGION(chunk.data, static_cast<std::size_t>(chunk.size_bytes));
    munmap(chunk.mapping, chunk.mapping_bytes);
  }
}

std::byte* Arena::address(Position position) const {
  return chunks_[static_cast<std::size_t>(position.first)].data + position.second;
}

void Arena::add_chunk(std::int64_t size_bytes) {
  size_bytes = round_up(std::max(size_bytes, std::min(reserved_bytes_, kLargestGrowthBytes)), kHugePageBytes);
  chunks_.push_back(options_.memory != nullptr && !on_host() ? reserve_chunk(size_bytes) : map_chunk(size_bytes));
  reserved_bytes_ += size_bytes;
  if (watcher_.reserved) watcher_.reserved(chunks_.back().data, size_bytes);
  mark_free({static_cast<int>(chunks_.size()) - 1, 0}, size_bytes);
}

Arena::Chunk Arena::reserve_chunk(std::int64_t size_bytes) {
  auto* data = static_cast<std::byte*>(options_.memory->reserve(size_bytes));
  if (options_.poison) poison(data, size_bytes);
  return {data, size_bytes, nullptr, 0};
}

Arena::Chunk Arena::map_chunk(std::int64_t size_bytes) {
  const auto mapping_bytes = static_cast<std::size_t>(size_bytes + kHugePageBytes);  // room to align the start
  void* mapping = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    throw IoError(fmt::format(
        "no memory for {} more bytes ({} reserved so far): {}; take a smaller model, fewer rows or fewer ranks a machine",
        size_bytes, reserved_bytes_, std::strerror(errno)));
  }
  const auto start = round_up(reinterpret_cast<std::intptr_t>(mapping), kHugePageBytes);
  auto* data = reinterpret_cast<std::byte*>(start);
  if (options_.huge_pages && notes_.empty() && madvise(data, static_cast<std::size_t>(size_bytes), MADV_HUGEPAGE) != 0) {
    notes_.push_back(fmt::format("no huge pages: madvise says {}; the first touch of memory will be slow", std::strerror(errno)));
  }
  if (options_.poison) {
    std::memset(data, kPoisonByte, static_cast<std::size_t>(size_bytes));
  } else {
    for (std::int64_t offset = 0; offset < size_bytes; offset += kSmallPageBytes) data[offset] = std::byte{0};
  }
  return {data, size_bytes, mapping, mapping_bytes};
}

void Arena::poison(std::byte* data, std::int64_t size_bytes) const { memory().set_bytes(data, kPoisonByte, size_bytes); }

void Arena::mark_free(Position position, std::int64_t size_bytes) {
  blocks_[position] = {size_bytes, 0, true, MemoryCategory::workspace};
  free_.insert({size_bytes, position.first, position.second});
  if (on_host()) ASAN_POISON_MEMORY_REGION(address(position), static_cast<std::size_t>(size_bytes));
}

Arena::Buffer Arena::allocate(std::int64_t size_bytes, MemoryCategory category) {
  TANDEM_CHECK(size_bytes >= 0, fmt::format("{} bytes asked for", size_bytes));
  const std::int64_t block_bytes = round_up(std::max<std::int64_t>(size_bytes, 1), alignment());
  auto best = free_.lower_bound({block_bytes, 0, 0});
  if (best == free_.end()) {
    add_chunk(block_bytes);
    best = free_.lower_bound({block_bytes, 0, 0});
  }
  const auto [found_bytes, chunk, offset] = *best;
  free_.erase(best);
  const std::int64_t counted_bytes = round_up(std::max<std::int64_t>(size_bytes, 1), kCountedUnit);
  blocks_[{chunk, offset}] = {block_bytes, counted_bytes, false, category};
  if (found_bytes > block_bytes) mark_free({chunk, offset + block_bytes}, found_bytes - block_bytes);
  ledger_.allocated(category, counted_bytes);

  Buffer buffer;
  buffer.arena_ = this;
  buffer.data_ = address({chunk, offset});
  buffer.size_bytes_ = size_bytes;
  buffer.chunk_ = chunk;
  buffer.offset_ = offset;
  if (on_host()) ASAN_UNPOISON_MEMORY_REGION(buffer.data_, static_cast<std::size_t>(block_bytes));
  if (options_.poison) poison(address({chunk, offset}), block_bytes);
  return buffer;
}

Arena::Buffer Arena::allocate(DType dtype, const Shape& shape, MemoryCategory category) {
  return allocate(num_elements(shape) * static_cast<std::int64_t>(size_bytes(dtype)), category);
}

void Arena::give_back(Buffer& buffer) noexcept {
  const auto block = blocks_.find({buffer.chunk_, buffer.offset_});
  ledger_.freed(block->second.category, block->second.counted_bytes);
  if (options_.poison) {
    try {
      poison(address(block->first), block->second.size_bytes);
    } catch (const std::exception&) {
      // The lane is broken: its next synchronize() says so.
    }
  }

  auto first = block;
  std::int64_t size_bytes = block->second.size_bytes;
  const auto take_in = [&](auto neighbour) {
    free_.erase({neighbour->second.size_bytes, neighbour->first.first, neighbour->first.second});
    size_bytes += neighbour->second.size_bytes;
  };
  const auto next = std::next(block);
  if (next != blocks_.end() && next->first.first == buffer.chunk_ && next->second.free) {
    take_in(next);
    blocks_.erase(next);
  }
  if (block != blocks_.begin()) {
    const auto previous = std::prev(block);
    if (previous->first.first == buffer.chunk_ && previous->second.free) {
      take_in(previous);
      first = previous;
      blocks_.erase(block);
    }
  }
  mark_free(first->first, size_bytes);
}

void Arena::reserve(std::int64_t size_bytes) {
  // One free block that holds it all: whatever the sizes of the calls to come, their sum fits (each rounds up to 64 bytes).
  if (free_.lower_bound({size_bytes, 0, 0}) == free_.end()) add_chunk(size_bytes);
}

void Arena::watch(ReservationWatcher watcher) {
  if (watcher_.given_back) {
    for (const Chunk& chunk : chunks_) watcher_.given_back(chunk.data);
  }
  watcher_ = std::move(watcher);
  if (!watcher_.reserved) return;
  for (const Chunk& chunk : chunks_) watcher_.reserved(chunk.data, chunk.size_bytes);
}

}  // namespace tandem
