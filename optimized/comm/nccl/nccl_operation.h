// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "kernels/memory.h"
#include "optimized/comm/parking.h"

namespace tandem {

/// What one step of an operation is issued with.
struct NcclUse {
  ncclComm_t comm;
  cudaStream_t stream;  ///< of the lane
  Memory& lane;
};

/// What a rank has given to a channel (nccl_channel.h). The channel calls what is virtual, with its lock held except in look().
class NcclOperation {
 public:
  NcclOperation() = default;
  NcclOperation(const NcclOperation&) = delete;
  NcclOperation& operator=(const NcclOperation&) = delete;
  virtual ~NcclOperation() = default;

  /// "rank 1: all_reduce 'bucket 2' of 100 fp32"
  [[nodiscard]] virtual std::string what() const = 0;
  /// Whether what it needs besides NCCL is there.
  [[nodiscard]] virtual bool may_begin() { return true; }
  /// Issues the step of this number, at most one group of NCCL calls, to the lane; false: there are no more. The next step
  /// follows once NCCL has taken this one.
  [[nodiscard]] virtual bool issue(int step, const NcclUse& use) = 0;
  /// The device has come to it, and has done it: between these two. `begin` is null unless it is timed.
  virtual void begun() {}
  virtual void finished(const std::shared_ptr<Memory::Mark>& /*begin*/, const std::shared_ptr<Memory::Mark>& /*end*/) {}
  /// It is next or under way since `waited`, and not done. May fail the world.
  virtual void look(std::chrono::nanoseconds waited) = 0;

 private:
  friend class NcclChannel;

  // Guarded by the channel.
  std::shared_ptr<Memory::Mark> after_, begin_, end_;
  Memory::Timed timed_ = Memory::Timed::no;
  int next_step_ = 0;
  bool is_begun_ = false, is_done_ = false;
  std::optional<Clock::time_point> waits_since_;
  Clock::time_point next_look_{};
};

}  // namespace tandem
