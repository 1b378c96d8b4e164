// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/heartbeat.h"
#include "core/pitfall.h"
#include "core/timeline.h"
#include "core/trace.h"
#include "kernels/kernels.h"
#include "optimized/comm/communicator.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// What one rank works with; handed down explicitly, there are no globals. Borrows everything; all must outlive the user.
struct RankContext {
  Communicator* world = nullptr;  ///< all ranks of the plan; the groups of each axis are split from it
  Kernels* kernels = nullptr;
  Arena* arena = nullptr;
  Timeline* timeline = nullptr;  ///< may be null
  PitfallSet pitfalls;
  TraceSink trace{};                 ///< may be empty
  ProgressSlot* progress = nullptr;  ///< may be null
};

}  // namespace tandem
