// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace tandem::simt_gpu {

/// Memory of the emulated GPU: one range of addresses, which nobody may touch but while a queue runs its work, so that host code
/// that does crashes; the signal's handler says why. Blocks lie 256 bytes apart at least. One for the process, for any thread.
class Heap {
 public:
  static constexpr std::int64_t kAlignment = 256;

  Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// Contents are not poisoned yet. Throws IoError where there is none left.
  [[nodiscard]] std::byte* allocate(std::int64_t size_bytes);
  void release(std::byte* block) noexcept;
  /// Of an allocated block; -1 of anything else.
  [[nodiscard]] std::int64_t size_bytes(const std::byte* block) const;

  /// Fills the block and the gap behind it with 0xFF; throws GpuError where the gap is not so any more. Both with Access.
  static void poison(std::byte* block, std::int64_t size_bytes);
  static void check_gap(const std::byte* block, std::int64_t size_bytes);

  /// In the range, allocated or not.
  [[nodiscard]] bool holds(const void* address) const noexcept;
  /// Wholly in one block.
  [[nodiscard]] bool holds_all(const void* address, std::int64_t size_bytes) const;

  /// While one lives in the process, memory may be touched.
  class Access {
   public:
    explicit Access(Heap& heap) : heap_(heap) { heap_.open(); }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    ~Access() { heap_.close(); }

   private:
    Heap& heap_;
  };
  /// Whether memory is protected when nobody has access; it is at first. For speed.
  void set_protected(bool on);

 private:
  void open();
  void close();
  void protect(int protection, std::int64_t from, std::int64_t end) const;

  std::byte* base_ = nullptr;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> blocks_;              // offset -> size, of what is allocated
  std::map<std::int64_t, std::int64_t> free_;                // offset -> size, never adjacent
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;  // (size, offset) of what is free
  std::int64_t end_ = 0;                                     // of what has ever been allocated
  int accesses_ = 0;
  bool protected_ = true;
};
[[nodiscard]] Heap& heap();

}  // namespace tandem::simt_gpu
