// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/policy.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

bool has(std::span<const AnomalyFinding> findings, FindingKind kind) {
  return std::ranges::any_of(findings, [kind](const AnomalyFinding& finding) { return kind_of(finding.monitor) == kind; });
}

PolicyVerdict go_back(const AnomalyConfig& config, const PolicyFacts& facts, const PitfallSet& pitfalls) {
  const bool too_often = facts.rollbacks_there >= config.max_rollbacks && !pitfalls.on(Pitfall::rollback_without_limit);
  return {facts.can_go_back && !too_often ? AnomalyDecision::roll_back : AnomalyDecision::give_up};
}

PolicyVerdict clip(const PolicyFacts& facts) {
  if (!std::isfinite(facts.applied_norm) || !(facts.usual_norm > 0)) return {AnomalyDecision::skip_step};
  PolicyVerdict verdict{AnomalyDecision::clip_harder};
  if (facts.applied_norm > facts.usual_norm) verdict.clip_factor = facts.usual_norm / facts.applied_norm;
  return verdict;
}

}  // namespace

FindingKind kind_of(AnomalyMonitor monitor) {
  switch (monitor) {
    case AnomalyMonitor::gradient_not_finite:
    case AnomalyMonitor::loss_spike:
    case AnomalyMonitor::norm_spike:
    case AnomalyMonitor::activation_range: return FindingKind::step;
    case AnomalyMonitor::weight_not_finite:
    case AnomalyMonitor::replica_divergence: return FindingKind::broken;
    case AnomalyMonitor::weight_range:
    case AnomalyMonitor::scale_collapse: return FindingKind::doubtful;
    case AnomalyMonitor::slow_collective:
    case AnomalyMonitor::slow_rank:
    case AnomalyMonitor::throughput_drop: return FindingKind::performance;
  }
  return FindingKind::performance;
}

PolicyVerdict decide(const AnomalyConfig& config, std::span<const AnomalyFinding> findings, const PolicyFacts& facts,
                     const PitfallSet& pitfalls) {
  const AnomalyAction action = config.action;
  if (action == AnomalyAction::off) return {};
  const bool broken = has(findings, FindingKind::broken);
  if (action != AnomalyAction::report) {
    const bool doubtful = has(findings, FindingKind::doubtful) && action == AnomalyAction::rollback;
    if (broken || doubtful) return go_back(config, facts, pitfalls);
  }
  if (!has(findings, FindingKind::step)) return {};
  // Computed from a broken state, it would be as wrong again.
  if (config.retry && !facts.retried && !broken) return {AnomalyDecision::retry};
  if (action == AnomalyAction::report) return {};
  if (action == AnomalyAction::skip) return {AnomalyDecision::skip_step};
  const bool finite = std::ranges::none_of(
      findings, [](const AnomalyFinding& finding) { return finding.monitor == AnomalyMonitor::gradient_not_finite; });
  if (action == AnomalyAction::clip) return finite ? clip(facts) : PolicyVerdict{AnomalyDecision::skip_step};
  PolicyVerdict verdict = go_back(config, facts, pitfalls);
  verdict.skip_batch = verdict.decision == AnomalyDecision::roll_back;
  return verdict;
}

}  // namespace tandem
