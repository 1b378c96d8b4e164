// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/monitors.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

// A gradient of zero is as good as a very small one.
double log_of(double norm) { return std::log(std::max(norm, 1e-30)); }

}  // namespace

StepMonitor::StepMonitor(const AnomalyConfig& config, const PitfallSet& pitfalls)
    : threshold_(config.threshold),
      size_(config.window),
      takes_all_(pitfalls.on(Pitfall::spike_enters_window)),
      losses_(config.window, kLossFloor),
      norms_(config.window, 0),
      log_norms_(config.window, 0, kLogNormFloor) {}

std::vector<AnomalyFinding> StepMonitor::judge(std::int64_t step, double loss, double norm) const {
  std::vector<AnomalyFinding> findings;
  const std::int64_t least = std::min(size_, kLeastValues);
  const auto look = [&](AnomalyMonitor monitor, const RobustWindow& window, double value) {
    const double z = window.z(value, least).value_or(0);
    if (z < threshold_) return;
    AnomalyFinding finding;
    finding.monitor = monitor;
    finding.step = step;
    finding.value = z;
    finding.limit = threshold_;
    findings.push_back(finding);
  };
  look(AnomalyMonitor::loss_spike, losses_, loss);
  look(AnomalyMonitor::norm_spike, log_norms_, log_of(norm));
  return findings;
}

void StepMonitor::end_step(std::int64_t step, double loss, double norm, bool clean) {
  const bool finite = std::isfinite(loss) && std::isfinite(norm);
  history_.push_back({step, loss, norm, (clean || takes_all_) && finite});
  if (history_.back().usable) {
    losses_.add(loss);
    norms_.add(norm);
    log_norms_.add(log_of(norm));
    unusual_ = 0;
    return;
  }
  // So many in a row are no spike but another level, which training has been let to go on at.
  if (++unusual_ < std::max(size_, kLeastValues)) return;
  for (Entry& entry : history_) entry.usable = false;
  losses_.clear();
  norms_.clear();
  log_norms_.clear();
  unusual_ = 0;
}

void StepMonitor::forget_from(std::int64_t step) {
  while (!history_.empty() && history_.back().step >= step) history_.pop_back();
  unusual_ = 0;
  fill_windows();
}

void StepMonitor::forget_before(std::int64_t step) {
  std::int64_t useful = 0;
  auto first = history_.end();
  while (first != history_.begin() && (std::prev(first)->step >= step || useful < size_)) {
    --first;
    useful += first->step < step && first->usable ? 1 : 0;
  }
  history_.erase(history_.begin(), first);
}

void StepMonitor::fill_windows() {
  losses_.clear();
  norms_.clear();
  log_norms_.clear();
  for (const Entry& entry : history_) {
    if (!entry.usable) continue;
    losses_.add(entry.loss);
    norms_.add(entry.norm);
    log_norms_.add(log_of(entry.norm));
  }
}

std::pair<std::vector<double>, std::vector<double>> StepMonitor::since(std::int64_t first) const {
  std::pair<std::vector<double>, std::vector<double>> values;
  for (const Entry& entry : history_) {
    if (entry.step < first) continue;
    values.first.push_back(entry.loss);
    values.second.push_back(entry.norm);
  }
  return values;
}

std::optional<AnomalyFinding> ScaleMonitor::see(std::int64_t step, double scale, bool overflowed) {
  if (!overflowed) {
    has_fitted_ = true;
    if (scale >= 1) has_collapsed_ = false;
  } else if (has_fitted_) {
    overflows_.push_back(step);
  }
  while (!overflows_.empty() && overflows_.front() <= step - window_) overflows_.pop_front();
  const bool often = std::ssize(overflows_) >= kHalvings;
  if (has_collapsed_ || !has_fitted_ || !(often || scale < 1)) return std::nullopt;
  has_collapsed_ = true;
  overflows_.clear();
  AnomalyFinding finding;
  finding.monitor = AnomalyMonitor::scale_collapse;
  finding.step = step;
  finding.value = scale;
  finding.limit = 1;
  return finding;
}

std::optional<double> DriftMonitor::see(double value) {
  const double median = window_.median();
  const std::optional<double> z = window_.z(value, rule_.least);
  const bool is_unusual = z && *z >= rule_.threshold && value >= rule_.ratio * median && value - median >= rule_.floor;
  if (!is_unusual) {
    window_.add(value);
    unusual_ = 0;
    return std::nullopt;
  }
  if (++unusual_ != rule_.sustain) return std::nullopt;
  return value / median;
}

}  // namespace tandem
