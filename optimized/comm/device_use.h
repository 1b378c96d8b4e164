// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/memory.h"

namespace tandem {

/// How an operation reaches buffers that do not lie in the host's memory. Whoever carries it out issues its work to `lane`,
/// behind `ready`, and synchronises the lane before it calls the operation complete.
struct DeviceUse {
  std::shared_ptr<Memory> lane;  ///< null: the buffers lie in the host's memory, or there are none
  /// The point of the rank's lane at which the operation was issued: before it the buffers are still being written, or read for
  /// the last time. Null: `lane` is the rank's own, of a rank that is alone; its order is all that is needed, and nobody
  /// synchronises.
  std::shared_ptr<Memory::Mark> ready;

  explicit operator bool() const noexcept { return lane != nullptr; }
  /// "host memory", or the lane's description.
  [[nodiscard]] std::string_view place() const noexcept { return lane ? lane->description() : "host memory"; }
};

/// The lanes of one endpoint beside its rank's own. Collectives share one, since they are carried out one after the other; a
/// message has one of its own while it is under way. Used by the thread that issues; what it hands out may be let go of by any.
class DeviceLanes {
 public:
  /// Borrowed; null or the host's: every buffer is the host's.
  void set_memory(Memory* memory);
  [[nodiscard]] Memory* memory() const noexcept { return memory_; }
  [[nodiscard]] bool on_device(std::span<const std::byte> bytes) const noexcept {
    return memory_ != nullptr && !bytes.empty() && memory_->holds(bytes.data());
  }

  /// Of an operation that is issued now.
  [[nodiscard]] DeviceUse for_collective();
  [[nodiscard]] DeviceUse for_message();
  /// Of any operation of a rank that is alone.
  [[nodiscard]] DeviceUse in_rank_order() const;

 private:
  struct Pool {
    std::mutex mutex;
    std::vector<std::unique_ptr<Memory>> free;
  };

  Memory* memory_ = nullptr;  // the rank's lane
  std::shared_ptr<Memory> collectives_;
  std::shared_ptr<Pool> pool_;
};

}  // namespace tandem
