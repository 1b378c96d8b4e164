// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/batch_source.h"
#include "core/config.h"
#include "core/fault_script.h"
#include "harness/case.h"
#include "optimized/anomaly/guard.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// One number of one rank that goes wrong, anywhere: element and bit are drawn.
struct Upset {
  FaultTarget target = FaultTarget::gradients;
  int rank = 0;
  std::int64_t step = 0;   ///< from 0
  std::uint64_t draw = 0;  ///< of the place; of the bit too
  bool nan = false;        ///< instead of a turned bit
};

/// The engine, with or without the guard, and nothing else: no trainer, no checkpoints, no second computation.
struct ProbeScript {
  RunConfig config;
  std::shared_ptr<const BatchSource> data;
  std::optional<Upset> upset = {};
  bool counts_not_finite = false;  ///< ProbeRun::not_finite_share
};

struct ProbeRun {
  std::vector<StepResult> steps;
  std::vector<AnomalyIncident> incidents;
  std::vector<double> not_finite_share;  ///< [steps] of all weights of all ranks, after the step
  std::int64_t guard_bytes = 0;          ///< of rank 0
  int bit = -1;                          ///< that was turned; of a float 31 is the sign, 30 to 23 the exponent
};

/// Guarded unless config.anomaly.action is off; the guard's decisions go no further than the update of the step.
[[nodiscard]] ProbeRun run_probe(const ProbeScript& script, const RunContext& context);

/// Times of steps with and without the guard, by turns of so many steps each, on two engines side by side. Of rank 0.
struct GuardTimes {
  std::vector<double> unwatched_seconds, watched_seconds;  ///< of each turn
};
[[nodiscard]] GuardTimes time_guard(const ProbeScript& script, int turns, std::int64_t steps_per_turn, const RunContext& context);

}  // namespace tandem
