// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optimized/comm/call.h"

namespace tandem {

/// The memory work of one collective, cut into units that any rank can do: each unit reads some elements from its sources and
/// stores the result at all destinations while it is in cache. Units belong to a rank, which takes them first; ranks that are
/// done with their own take those of others, so that nobody waits for a rank that the scheduler has put aside. Which thread does
/// a unit changes no bit: a sum is formed element by element, in rank order.
///
/// Buffers in a device's memory are not cut: the device is not the faster for it.
///
/// One object serves all collectives of a group, one after the other. prepare() is called by one thread while no other uses the
/// object; work() by all.
class TransferPlan {
 public:
  explicit TransferPlan(int ranks);

  void prepare(std::span<const Call* const> calls);
  /// Small enough that waking another rank would take longer.
  [[nodiscard]] bool small() const noexcept { return small_; }
  /// Nothing to move at all.
  [[nodiscard]] bool empty() const noexcept { return units_ == 0; }
  /// Does units until none is left. Returns true to the thread that finished the last one.
  [[nodiscard]] bool work(int rank) noexcept;
  /// Of buffers in a device's memory: issues everything to this lane, behind the points that the calls name, and synchronises it.
  void work_in(Memory& lane);

 private:
  struct alignas(64) Part {
    std::atomic<std::int64_t> next{0};  ///< first unit that nobody has taken
    std::int64_t units = 0;
    std::int64_t first = 0;  ///< its first element in the whole
    std::int64_t elements = 0;
  };

  /// Addresses of one unit's streams; each rank has its own, so that work() allocates nothing.
  struct Streams {
    std::vector<const std::byte*> sources;
    std::vector<std::byte*> destinations;
  };

  /// What an all_to_all moves from one rank to another.
  struct Run {
    const std::byte* from;
    std::byte* to;
    std::int64_t bytes;
  };

  void cut_into_units() noexcept;
  void find_streams(int owner, std::int64_t first, Streams& streams) const;
  [[nodiscard]] bool sums() const noexcept { return kind_ == CallKind::all_reduce || kind_ == CallKind::reduce_scatter; }
  [[nodiscard]] std::int64_t work_on(int owner, Streams& streams) noexcept;
  void run_unit(int owner, std::int64_t unit, Streams& streams) noexcept;
  [[nodiscard]] Run exchanged(int receiver, int sender) const noexcept;
  void issue_part(int owner, Memory& lane);

  const int ranks_;
  CallKind kind_ = CallKind::barrier;
  DType dtype_ = DType::u8;
  std::int64_t width_ = 1;  ///< bytes of an element
  std::int64_t unit_elements_ = 1;
  int root_ = -1;
  bool small_ = true;
  bool on_device_ = false;
  std::int64_t units_ = 0;
  std::vector<Part> parts_;
  std::vector<const Call*> calls_;
  std::vector<Streams> streams_;
  alignas(64) std::atomic<std::int64_t> units_done_{0};
};

}  // namespace tandem
