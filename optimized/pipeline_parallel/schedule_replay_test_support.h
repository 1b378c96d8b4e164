// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "optimized/pipeline_parallel/schedule.h"

namespace tandem {

/// Of one chunk and micro-batch, in any unit of time.
struct SlotCosts {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
};

struct ScheduleFacts {
  double makespan = 0;
  double bubble_share = 0;          ///< 1 - work / (ranks * makespan)
  std::vector<int> peak_in_flight;  ///< [ranks] from forward to backward or backward_weight
  std::vector<double> gaps;         ///< [ranks] idle between the rank's first and last slot
};

/// Replays the slots of all ranks, each in its order, with free messages: a forward waits for that of the stage before, a
/// backward for its own forward and the backward (input part) of the stage after. Throws ContractError where they never end or a
/// slot comes before what it needs on its own rank.
[[nodiscard]] ScheduleFacts replay_schedule(const PipelineConfig& config, const std::vector<std::vector<PipelineSlot>>& orders,
                                            SlotCosts costs);

}  // namespace tandem
