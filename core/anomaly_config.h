// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tandem {

/// What is done about a step whose loss or gradient is wrong, and that is as wrong when it is computed again.
///   off       nobody looks
///   report    it is said and kept; training does what it would have done
///   skip      the update of the step is left out
///   clip      the gradient is clipped to the median of the window; what is not finite is skipped
///   rollback  back to the last healthy checkpoint, and the batch is left out for good
enum class AnomalyAction : std::uint8_t { off, report, skip, clip, rollback };

struct AnomalyConfig {
  AnomalyAction action = AnomalyAction::report;
  /// Compute a suspicious step once more before anything else is done: what has gone then was the machine's, not the data's.
  bool retry = true;
  std::int64_t window = 64;              ///< steps that a step is compared with
  double threshold = 12;                 ///< robust z-score, |x - median| / (1.4826 MAD), from which on a step is suspicious
  std::int64_t confirm_steps = 8;        ///< steps without a finding after a checkpoint that make it healthy
  std::int64_t sample_every_steps = 16;  ///< between two looks at weights, activations, replicas and links
  std::int64_t max_rollbacks = 3;        ///< to the same checkpoint; one more ends the run with a report
  friend bool operator==(const AnomalyConfig&, const AnomalyConfig&) = default;
};

}  // namespace tandem
