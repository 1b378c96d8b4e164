// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>

#include "core/heartbeat.h"
#include "core/step_program.h"
#include "core/timeline.h"

namespace tandem {

/// Who looks at this rank from outside sees whether it gets anything done, and whether it waits for another.
class ProgressScope {
 public:
  ProgressScope(ProgressSlot* slot, bool waits) : slot_(slot) {
    if (slot_ != nullptr && waits) slot_->waiting.store(true, std::memory_order_relaxed);
  }
  ProgressScope(ProgressSlot* slot, OpKind kind) : ProgressScope(slot, kind == OpKind::communicate) {}
  ProgressScope(const ProgressScope&) = delete;
  ProgressScope& operator=(const ProgressScope&) = delete;
  ~ProgressScope() {
    // Who leaves an operation by its failure has got nothing done, and waits for whom it waited for.
    if (slot_ == nullptr || std::uncaught_exceptions() > exceptions_) return;
    slot_->waiting.store(false, std::memory_order_relaxed);
    slot_->advance();
  }

 private:
  ProgressSlot* slot_;
  int exceptions_ = std::uncaught_exceptions();
};

/// Own work, without waiting for others.
class BusyScope {
 public:
  /// Adds to `sum_ns`; where the slot is null, nobody asks.
  BusyScope(const ProgressSlot* slot, std::int64_t& sum_ns)
      : sum_ns_(slot != nullptr ? &sum_ns : nullptr), begin_ns_(slot != nullptr ? Timeline::now_ns() : 0) {}
  BusyScope(const BusyScope&) = delete;
  BusyScope& operator=(const BusyScope&) = delete;
  ~BusyScope() {
    if (sum_ns_ != nullptr) *sum_ns_ += Timeline::now_ns() - begin_ns_;
  }

 private:
  std::int64_t* sum_ns_;
  std::int64_t begin_ns_;
};

}  // namespace tandem
