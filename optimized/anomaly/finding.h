// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// What looks at a run, in the order in which a step is looked at.
enum class AnomalyMonitor : std::uint8_t {
  gradient_not_finite,  ///< NaN or infinity in the loss or gradient of any rank
  loss_spike,           ///< robust z-score of the loss over the window
  norm_spike,           ///< of the gradient norm
  activation_range,     ///< largest magnitude of a block's output, by layer
  weight_not_finite,    ///< of a parameter or its optimizer state
  weight_range,         ///< largest magnitude of a tensor
  replica_divergence,   ///< copies of one tensor that differ: silent data corruption
  scale_collapse,       ///< the loss scale has fallen by many powers of two, or below 1
  slow_collective,      ///< a collective takes longer than it did; the probe names the link
  slow_rank,            ///< a rank computes longer than the others and than it did
  throughput_drop,      ///< tokens per second
};
[[nodiscard]] std::string_view name(AnomalyMonitor monitor);

/// What a monitor says. The same on all ranks.
struct AnomalyFinding {
  AnomalyMonitor monitor = AnomalyMonitor::loss_spike;
  std::int64_t step = 0;  ///< from 0: the step under way, or the one that has just ended
  int rank = -1;          ///< where it started or which copy is the odd one; -1: not known, or all alike
  std::string where;      ///< tensor, layer, collective or link; may be empty
  double value = 0;       ///< what was seen
  double limit = 0;       ///< from where on it is a finding
  /// One line: "rank 1: the gradient is not finite (h.3.mlp.c_fc.weight)".
  [[nodiscard]] std::string describe() const;
};

/// What the ranks have agreed to do.
enum class AnomalyDecision : std::uint8_t {
  go_on,
  skip_step,    ///< leave the update out
  clip_harder,  ///< apply it with UpdateDecision::clip_factor
  retry,        ///< compute the step again from the same state
  roll_back,    ///< to AnomalyGuard::rollback_step()
  give_up,      ///< end the run: the same place has been rolled back to too often, or there is nothing to go back to
};
[[nodiscard]] std::string_view name(AnomalyDecision decision);

}  // namespace tandem
