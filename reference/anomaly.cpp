// SPDX-License-Identifier: Apache-2.0
#include "reference/anomaly.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"

namespace tandem::reference {
namespace {

// A standard deviation in units of the median absolute deviation, where values are normal.
constexpr double kNormalScale = 1.4826;

bool is_suspicious(const std::vector<double>& accepted, double value, const OutlierRule& rule) {
  if (!std::isfinite(value)) return true;
  if (std::ssize(accepted) < rule.least) return false;
  const auto used = std::min<std::ptrdiff_t>(rule.window, std::ssize(accepted));
  return robust_z({accepted.end() - used, accepted.end()}, value, rule.relative_floor) >= rule.threshold;
}

// Whether so many steps in a row, anywhere behind a save, had no finding. Saves in between do not matter.
bool is_confirmed(const std::vector<RunEvent>& history, std::size_t save, std::int64_t confirm_steps) {
  std::int64_t in_a_row = 0;
  for (std::size_t i = save + 1; i < history.size() && in_a_row < confirm_steps; ++i) {
    const RunEvent& event = history[i];
    if (event.kind == RunEvent::Kind::rolled_back && event.number < history[save].number) return false;
    if (event.kind == RunEvent::Kind::step) ++in_a_row;
    if (event.kind == RunEvent::Kind::finding || event.kind == RunEvent::Kind::rolled_back) in_a_row = 0;
  }
  return in_a_row >= confirm_steps;
}

// A run that is told step by step.
class Interpreter {
 public:
  explicit Interpreter(const PolicyRun& run) : run_(run), anomalies_(run.anomalies) { outcome_.skipped = run.skipped; }

  PolicyOutcome tell() {
    while (step_ < run_.steps && !outcome_.gave_up) one_step();
    outcome_.healthy = healthy_checkpoints(history_, run_.policy.confirm_steps);
    return std::move(outcome_);
  }

 private:
  using Fate = Computation::Fate;
  using Cause = ScriptedAnomaly::Cause;
  struct Look {
    bool suspicious = false, finite = true, state_is_wrong = false;
  };

  void one_step() {
    Look look = compute();
    if (look.suspicious && run_.policy.retry && run_.policy.action != AnomalyAction::off) {
      note(Fate::retried);
      look = compute();
    }
    const Fate fate = fate_of(look);
    note(fate);
    if (fate == Fate::gave_up) {
      outcome_.gave_up = true;
    } else if (fate == Fate::rolled_back) {
      if (look.suspicious) outcome_.skipped.insert(batch());
      roll_back();
    } else {
      outcome_.trained.push_back(fate == Fate::skipped ? -1 : batch());
      // Where nobody looks, nothing is found.
      const bool found = (look.suspicious || look.state_is_wrong) && run_.policy.action != AnomalyAction::off;
      history_.push_back({found ? RunEvent::Kind::finding : RunEvent::Kind::step, step_});
      ++step_;
      const std::int64_t every = run_.checkpoint_every_steps;
      if (every > 0 && step_ % every == 0) history_.push_back({RunEvent::Kind::save, step_});
    }
  }

  // Uses up what strikes.
  Look compute() {
    Look look;
    for (ScriptedAnomaly& anomaly : anomalies_) {
      const bool of_data = anomaly.cause == Cause::data;
      if (anomaly.at != (of_data ? batch() : step_)) continue;
      if (!of_data && anomaly.strikes-- <= 0) continue;
      (anomaly.cause == Cause::state ? look.state_is_wrong : look.suspicious) = true;
      look.finite = look.finite && anomaly.finite;
    }
    return look;
  }

  [[nodiscard]] Fate fate_of(const Look& look) const {
    const AnomalyAction action = run_.policy.action;
    if (action == AnomalyAction::off || action == AnomalyAction::report) return Fate::applied;
    if (!look.state_is_wrong) {
      if (!look.suspicious) return Fate::applied;
      if (action == AnomalyAction::skip) return Fate::skipped;
      if (action == AnomalyAction::clip) return look.finite ? Fate::clipped : Fate::skipped;
    }
    const auto before = outcome_.rollbacks.find(aim());
    const bool too_often = before != outcome_.rollbacks.end() && before->second >= run_.policy.max_rollbacks;
    return too_often ? Fate::gave_up : Fate::rolled_back;
  }

  // The newest healthy checkpoint; 0 is the beginning.
  [[nodiscard]] std::int64_t aim() const {
    const std::set<std::int64_t> healthy = healthy_checkpoints(history_, run_.policy.confirm_steps);
    return healthy.empty() ? 0 : *healthy.rbegin();
  }

  void roll_back() {
    const std::int64_t to = aim();
    ++outcome_.rollbacks[to];
    outcome_.trained.resize(static_cast<std::size_t>(to));
    history_.push_back({RunEvent::Kind::rolled_back, to});
    step_ = to;
  }

  [[nodiscard]] std::int64_t batch() const { return batch_of(step_, outcome_.skipped); }
  void note(Fate fate) { outcome_.computations.push_back({step_, batch(), fate}); }

  const PolicyRun& run_;
  std::vector<ScriptedAnomaly> anomalies_;
  PolicyOutcome outcome_;
  std::vector<RunEvent> history_;
  std::int64_t step_ = 0;
};

}  // namespace

double median_of(std::vector<double> values) {
  TANDEM_CHECK(!values.empty(), "nothing has no median");
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double robust_z(const std::vector<double>& values, double x, double relative_floor) {
  if (!std::isfinite(x)) return std::numeric_limits<double>::infinity();
  const double m = median_of(values);
  std::vector<double> deviations;
  for (const double value : values) deviations.push_back(std::abs(value - m));
  const double spread = std::max(kNormalScale * median_of(deviations), relative_floor * std::abs(m));
  if (x == m) return 0;
  return (x - m) / spread;
}

std::vector<std::size_t> suspicious_steps(const std::vector<double>& series, const OutlierRule& rule) {
  std::vector<std::size_t> found;
  std::vector<double> accepted;
  for (std::size_t i = 0; i < series.size(); ++i) {
    if (is_suspicious(accepted, series[i], rule)) {
      found.push_back(i);
    } else {
      accepted.push_back(series[i]);
    }
  }
  return found;
}

std::int64_t batch_of(std::int64_t step, const std::set<std::int64_t>& skipped) {
  std::int64_t taken = -1;
  for (std::int64_t batch = 0;; ++batch) {
    if (skipped.contains(batch)) continue;
    if (++taken == step) return batch;
  }
}

std::optional<std::vector<int>> odd_copies(const std::vector<std::uint64_t>& hashes) {
  for (const std::uint64_t candidate : hashes) {
    std::vector<int> others;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (hashes[i] != candidate) others.push_back(static_cast<int>(i));
    }
    if (2 * others.size() < hashes.size()) return others;
  }
  return std::nullopt;
}

std::set<std::int64_t> healthy_checkpoints(const std::vector<RunEvent>& history, std::int64_t confirm_steps) {
  std::set<std::int64_t> healthy;
  for (std::size_t i = 0; i < history.size(); ++i) {
    const std::int64_t number = history[i].number;
    if (history[i].kind == RunEvent::Kind::rolled_back) healthy.erase(healthy.upper_bound(number), healthy.end());
    if (history[i].kind == RunEvent::Kind::save && is_confirmed(history, i, confirm_steps)) healthy.insert(number);
  }
  return healthy;
}

PolicyOutcome follow_policy(const PolicyRun& run) { return Interpreter(run).tell(); }

TrainingRun without_batches(TrainingRun run, const std::set<std::int64_t>& skipped) {
  run.batch = [all = std::move(run.batch), skipped](std::int64_t step) { return all(batch_of(step, skipped)); };
  return run;
}

}  // namespace tandem::reference
