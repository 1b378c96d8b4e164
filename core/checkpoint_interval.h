// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tandem {

/// What decides how often to save.
struct CheckpointCosts {
  double save_seconds = 0;     ///< that training stands still for one checkpoint
  double restart_seconds = 0;  ///< from a failure to the first new step
  double failure_seconds = 0;  ///< mean time between failures of the whole job: of one node, divided by the nodes
};

/// Seconds of work between two checkpoints that lose the least time.
///   Young (1974): sqrt(2 d M), d = save_seconds, M = failure_seconds
///   Daly (2006), higher order: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d for d < 2M, else M
[[nodiscard]] double young_interval_seconds(const CheckpointCosts& costs);
[[nodiscard]] double daly_interval_seconds(const CheckpointCosts& costs);

/// Useful share of the time with failures at random (exponential) and `interval_seconds` of work between checkpoints, by Daly's
/// complete model: T_s / (M e^(R/M) (e^((t+d)/M) - 1) T_s / t).
[[nodiscard]] double goodput(const CheckpointCosts& costs, double interval_seconds);

}  // namespace tandem
