// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/finding.h"

#include <cmath>

#include <fmt/format.h>

namespace tandem {
namespace {

std::string what(const AnomalyFinding& finding) {
  const std::string seen = fmt::format("{:.4g}, limit {:.4g}", finding.value, finding.limit);
  switch (finding.monitor) {
    case AnomalyMonitor::gradient_not_finite: return "loss or gradient is not finite";
    case AnomalyMonitor::loss_spike: return fmt::format("the loss spikes: z {}", seen);
    case AnomalyMonitor::norm_spike: return fmt::format("the gradient norm spikes: z {}", seen);
    case AnomalyMonitor::activation_range:
      if (!std::isfinite(finding.value)) return "an activation is not finite";
      return fmt::format("an activation is out of range: largest magnitude {}", seen);
    case AnomalyMonitor::weight_not_finite: return "a weight or its optimizer state is not finite";
    case AnomalyMonitor::weight_range: return fmt::format("a weight is out of range: largest magnitude {}", seen);
    case AnomalyMonitor::replica_divergence: return "a copy of the state differs from its replicas";
    case AnomalyMonitor::scale_collapse: return fmt::format("the loss scale has collapsed to {:.4g}", finding.value);
    case AnomalyMonitor::slow_collective: return fmt::format("communication is slow: {} times as long as before", seen);
    case AnomalyMonitor::slow_rank: return fmt::format("computes slowly: {} times as long as the others and as before", seen);
    case AnomalyMonitor::throughput_drop: return fmt::format("throughput has dropped: a token takes {} times as long", seen);
  }
  return "?";
}

}  // namespace

std::string_view name(AnomalyMonitor monitor) {
  switch (monitor) {
    case AnomalyMonitor::gradient_not_finite: return "gradient_not_finite";
    case AnomalyMonitor::loss_spike: return "loss_spike";
    case AnomalyMonitor::norm_spike: return "norm_spike";
    case AnomalyMonitor::activation_range: return "activation_range";
    case AnomalyMonitor::weight_not_finite: return "weight_not_finite";
    case AnomalyMonitor::weight_range: return "weight_range";
    case AnomalyMonitor::replica_divergence: return "replica_divergence";
    case AnomalyMonitor::scale_collapse: return "scale_collapse";
    case AnomalyMonitor::slow_collective: return "slow_collective";
    case AnomalyMonitor::slow_rank: return "slow_rank";
    case AnomalyMonitor::throughput_drop: return "throughput_drop";
  }
  return "?";
}

std::string_view name(AnomalyDecision decision) {
  switch (decision) {
    case AnomalyDecision::go_on: return "go_on";
    case AnomalyDecision::skip_step: return "skip_step";
    case AnomalyDecision::clip_harder: return "clip_harder";
    case AnomalyDecision::retry: return "retry";
    case AnomalyDecision::roll_back: return "roll_back";
    case AnomalyDecision::give_up: return "give_up";
  }
  return "?";
}

std::string AnomalyFinding::describe() const {
  const std::string who = rank >= 0 ? fmt::format("rank {}: ", rank) : std::string();
  return who + what(*this) + (where.empty() ? "" : fmt::format(" ({})", where));
}

}  // namespace tandem
