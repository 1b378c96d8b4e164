// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/memory_ledger.h"
#include "core/tensor.h"
#include "kernels/memory.h"

namespace tandem {

struct ArenaOptions {
  /// Every block is filled with 0xFF bytes when it is handed out and when it comes back: a NaN in every floating dtype, -1 in
  /// the integers, so that an element that nobody wrote, or that was read after its release, shows in the result.
  bool poison = false;
  /// Ask for 2 MiB pages. Touching fresh memory is an order of magnitude slower without them on virtual machines.
  bool huge_pages = true;
  /// Where the chunks are reserved, and in the order of which lane they are poisoned; must outlive the arena. Null: the host, in
  /// pages of its own.
  Memory* memory = nullptr;
};

/// Told of an arena's large reservations, by address.
struct ReservationWatcher {
  std::function<void(void* address, std::int64_t size_bytes)> reserved;
  std::function<void(void* address)> given_back;  ///< before it is; throws nothing
};

/// The memory of one rank: blocks cut from large, 2 MiB-aligned, touched and kept reservations, each block with its category.
///
/// Blocks are 64-byte aligned, on a device 256-byte. A released block joins its free neighbours and is reused, best fit first;
/// which block a sequence of calls gets is the same in every run. Reserved memory goes back to the system only with the arena.
/// Not thread-safe: one rank, one thread.
class Arena {
 public:
  /// Owner of one block; gives it back to its arena, which must outlive it. Move-only; default-constructed or moved-from it is
  /// empty.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

    /// Gives the block back now.
    void release() noexcept;

    [[nodiscard]] void* data() const noexcept { return data_; }
    /// What was asked for.
    [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }
    /// The first elements of the block as a tensor; throws ContractError where it does not hold that many.
    [[nodiscard]] TensorView view(DType dtype, const Shape& shape) const;
    explicit operator bool() const noexcept { return data_ != nullptr; }

   private:
    friend class Arena;
    Arena* arena_ = nullptr;
    void* data_ = nullptr;
    std::int64_t size_bytes_ = 0;
    int chunk_ = 0;
    std::int64_t offset_ = 0;
  };

  explicit Arena(const ArenaOptions& options = {});
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// A block of at least `size_bytes` >= 0 bytes, contents undefined. The ledger counts the size rounded up to 64 bytes (64 for
  /// an empty block), wherever the block lies: what a device's alignment takes beyond that is slack. Throws IoError where the
  /// system has no memory left.
  [[nodiscard]] Buffer allocate(std::int64_t size_bytes, MemoryCategory category);
  /// A block for one tensor; read it by view(dtype, shape).
  [[nodiscard]] Buffer allocate(DType dtype, const Shape& shape, MemoryCategory category);

  /// Reserves and touches memory for `size_bytes` more, so that no later call of that total waits for the system.
  void reserve(std::int64_t size_bytes);

  /// Tells `watcher` of the reservations that there are and of later ones, and the watcher before it, if any, that they are given
  /// back: to it they are. Without functions: nobody watches, as at the beginning.
  void watch(ReservationWatcher watcher);

  /// Where the blocks lie.
  [[nodiscard]] Memory& memory() const noexcept { return options_.memory != nullptr ? *options_.memory : host_memory(); }
  [[nodiscard]] const MemoryLedger& ledger() const noexcept { return ledger_; }
  /// For reset_peaks() between measurements.
  [[nodiscard]] MemoryLedger& ledger() noexcept { return ledger_; }
  /// Taken from the system, in use or not. Less ledger().current(), it is the slack, which the ledger does not count.
  [[nodiscard]] std::int64_t reserved_bytes() const noexcept { return reserved_bytes_; }
  /// One line per fallback taken ("no huge pages: ...").
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  struct Chunk {
    std::byte* data;
    std::int64_t size_bytes;
    void* mapping;
    std::size_t mapping_bytes;
  };
  struct Block {
    std::int64_t size_bytes;
    std::int64_t counted_bytes;
    bool free;
    MemoryCategory category;
  };
  using Position = std::pair<int, std::int64_t>;  // chunk, offset

  [[nodiscard]] bool on_host() const noexcept { return memory().on_host(); }
  [[nodiscard]] std::int64_t alignment() const noexcept { return on_host() ? 64 : 256; }  // bytes
  void add_chunk(std::int64_t size_bytes);
  [[nodiscard]] Chunk map_chunk(std::int64_t size_bytes);
  [[nodiscard]] Chunk reserve_chunk(std::int64_t size_bytes);
  void poison(std::byte* data, std::int64_t size_bytes) const;
  void give_back(Buffer& buffer) noexcept;
  void mark_free(Position position, std::int64_t size_bytes);
  [[nodiscard]] std::byte* address(Position position) const;

  ArenaOptions options_;
  MemoryLedger ledger_;
  std::vector<Chunk> chunks_;
  std::map<Position, Block> blocks_;                            // every byte of every chunk belongs to one
  std::set<std::tuple<std::int64_t, int, std::int64_t>> free_;  // size, chunk, offset of the free ones
  std::int64_t reserved_bytes_ = 0;
  std::vector<std::string> notes_;
  ReservationWatcher watcher_;
};

}  // namespace tandem
