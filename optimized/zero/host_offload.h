// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/batch.h"
#include "core/pitfall.h"
#include "core/tensor.h"
#include "core/timeline.h"
#include "optimized/memory/arena.h"
#include "optimized/zero/transfer_thread.h"

namespace tandem {

struct HostOffloadOptions {
  int tensors = 0;  ///< 3: master weights and two moments; 2: the moments alone
  std::int64_t elements = 0;
  DType dtype = DType::f32;
  /// Of each tensor, twice on the device. Small enough that a chunk is still in a cache when it is updated and copied back.
  std::int64_t chunk_elements = 1 << 18;
  PitfallSet pitfalls{};
  /// Copies equally many elements; called on the transfer thread. Empty: by a lane of the device's memory.
  std::function<void(TensorView from, TensorView to)> copy{};
};

/// A part of one segment that is on the device.
struct OffloadedPart {
  std::size_t segment = 0;              ///< which of the caller's segments it belongs to
  Interval elements;                    ///< of the whole state
  std::span<const TensorView> tensors;  ///< [options.tensors] of [elements.size()]; updated in place
};

/// What crossed between host and device since the beginning.
struct OffloadTraffic {
  std::int64_t bytes_to_device = 0;
  std::int64_t bytes_to_host = 0;
  std::int64_t transfer_ns = 0;  ///< in which bytes moved
  std::int64_t exposed_ns = 0;   ///< in which the update waited for them, the waking of threads included
};

/// Optimizer state that lives in host memory (Ren et al., "ZeRO-Offload", 2021): `tensors` tensors of `elements` elements each.
/// The update goes through it in chunks. While chunk i is updated in one staging buffer of the device, a transfer thread copies
/// chunk i - 1 from the other one back to the host and then chunk i + 1 into it. A chunk has the chunk size, whatever lies in it:
/// were it to end with each tensor, a weight that follows a bias would have nothing to hide its copy behind.
///
/// The host memory is counted by the host arena (MemoryCategory::optimizer), the staging buffers by the device arena
/// (MemoryCategory::workspace), for the duration of for_each_chunk alone. Both arenas are borrowed, must outlive this, and are
/// used on the caller's thread only. On a GPU updates and copies go on without the host, each after what it needs; what is told
/// of an update is when it was issued.
class HostOffload {
 public:
  using Update = std::function<void(const OffloadedPart& part)>;

  /// Host contents are undefined: fill them by host(). Throws ContractError where a number is negative or chunk_elements < 1.
  HostOffload(Arena& device, Arena& host, const HostOffloadOptions& options);

  /// The whole of one tensor, [elements], in host memory: to fill, save and load it. Not to be touched by an update.
  [[nodiscard]] TensorView host(int tensor) const;

  /// Calls `update` for every element of every segment once, in order, one part of one segment at a time, where the segments are
  /// cut at the ends of chunks; returns when all are back in host memory. Segments ascend and do not overlap (ContractError);
  /// what lies between them is left alone. Exceptions of `update` and of the copies are passed on, after the transfer thread has
  /// come to rest: the host then holds the old values of some chunks, and the new ones of others.
  ///
  /// Records Activity::optimizer for the updates of each chunk, Activity::wait for the time the update waited for a chunk, and on
  /// the communication lane Activity::transfer, with 0 bytes, because none are on the wire. A span around the whole call would
  /// hide the waits. The part of a transfer that lies under an optimizer span is hidden. `timeline` may be null.
  void for_each_chunk(std::span<const Interval> segments, const Update& update, Timeline* timeline, int step = -1);

  /// What for_each_chunk takes from the device arena for these segments: the staging buffers, two of them unless one chunk is
  /// all there is, each with `tensors` blocks of the chunk size, or of all segments where that is less, rounded up to the arena's
  /// 64 bytes.
  [[nodiscard]] std::int64_t staging_bytes(std::span<const Interval> segments) const;
  [[nodiscard]] const OffloadTraffic& traffic() const noexcept { return traffic_; }

 private:
  struct Part {
    std::size_t segment;
    Interval elements;
    std::int64_t offset;  // elements before it in its chunk
  };
  using Chunk = std::vector<Part>;
  class Pass;

  [[nodiscard]] std::vector<Chunk> chunks_of(std::span<const Interval> segments) const;
  // Elements of a staging block.
  [[nodiscard]] std::int64_t staging_elements(const std::vector<Chunk>& chunks) const;

  Arena& device_;
  std::unique_ptr<Memory> lane_;  // of the transfer thread
  HostOffloadOptions options_;
  std::vector<Arena::Buffer> host_;  // [tensors]
  OffloadTraffic traffic_;           // of the transfer thread while it works
  TransferThread thread_;            // the last member: it must rest before the others go
};

}  // namespace tandem
