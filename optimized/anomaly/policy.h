// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "core/anomaly_config.h"
#include "core/pitfall.h"
#include "optimized/anomaly/finding.h"

namespace tandem {

/// Whom a finding accuses, and with that what helps.
enum class FindingKind : std::uint8_t {
  step,         ///< the step under way: its batch, or the machine while it was computed
  broken,       ///< the state is no state of this run any more: only going back helps
  doubtful,     ///< the state may be wrong
  performance,  ///< nothing is wrong but the time
};
[[nodiscard]] FindingKind kind_of(AnomalyMonitor monitor);

/// What a decision depends on, the same on all ranks.
struct PolicyFacts {
  bool retried = false;              ///< the step has been computed twice
  bool can_go_back = false;          ///< there is a state to go back to
  std::int64_t rollbacks_there = 0;  ///< so far
  double applied_norm = 0;           ///< of the gradient after clipping
  double usual_norm = 0;             ///< median of the window; 0: not known
};

struct PolicyVerdict {
  AnomalyDecision decision = AnomalyDecision::go_on;
  double clip_factor = 1;   ///< of clip_harder
  bool skip_batch = false;  ///< of roll_back: the batch of the step is left out from now on
};

/// What is done about a step's findings (AnomalyAction says it in words). A function of its arguments alone.
///
///   nothing, or performance only   go_on
///   state broken                   roll_back, whatever the action is; go_on under report
///   state doubtful                 roll_back under rollback, else go_on
///   step, first time, config.retry retry
///   step                           by action: go_on, skip_step, clip_harder (skip_step where nothing is known to clip to, or the
///                                  gradient is not finite), roll_back without the batch
///   roll_back more than max_rollbacks times to the same state, or nowhere to go: give_up
[[nodiscard]] PolicyVerdict decide(const AnomalyConfig& config, std::span<const AnomalyFinding> findings,
                                   const PolicyFacts& facts, const PitfallSet& pitfalls = {});

}  // namespace tandem
