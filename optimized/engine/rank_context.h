// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/pitfall.h"
#include "core/timeline.h"
#include "kernels/kernels.h"
#include "optimized/comm/communicator.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// What one rank works with; handed down explicitly, there are no globals. Borrows everything; all must outlive the user.
struct RankContext {
  Communicator* data = nullptr;  ///< the ranks that hold the same parameters and different rows
  Kernels* kernels = nullptr;
  Arena* arena = nullptr;
  Timeline* timeline = nullptr;  ///< may be null
  PitfallSet pitfalls;
};

}  // namespace tandem
