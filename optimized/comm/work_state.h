// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/comm/communicator.h"

namespace tandem {

/// What a transport knows of one operation under way; the handle Work calls exactly one of wait() and drop().
class Work::State {
 public:
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  virtual ~State() = default;

  /// Blocks until complete, throws what went wrong.
  virtual void wait() = 0;
  [[nodiscard]] virtual bool done() const noexcept = 0;
  /// The handle goes away unwaited. On return nobody touches the operation's buffers any more.
  virtual void drop() noexcept = 0;
};

}  // namespace tandem
