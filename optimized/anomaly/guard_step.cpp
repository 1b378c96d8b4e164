// SPDX-License-Identifier: Apache-2.0
// The step at hand: its loss, its gradient, its activations.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/io/binary.h"
#include "optimized/anomaly/guard_state.h"
#include "optimized/comm/exchange.h"

namespace tandem {
namespace {

// What one rank knows of a step that something is wrong with.
struct OwnSigns {
  bool loss_finite = true;
  bool gradient_finite = true;
  int layer = -1;  // lowest whose output is out of range
  double value = 0, limit = 0;
};
template <class Archive>
void serialize(Archive& archive, OwnSigns& signs) {
  archive(signs.loss_finite, signs.gradient_finite, signs.layer, signs.value, signs.limit);
}

AnomalyFinding finding_of(AnomalyMonitor monitor, std::int64_t step) {
  AnomalyFinding finding;
  finding.monitor = monitor;
  finding.step = step;
  return finding;
}

// Where a fault of these signs began: in the lowest layer whose output shows it, else on the first rank that sees it in what it
// has computed itself. Empty where no rank does: it came with the sum.
AnomalyFinding origin_of(const std::vector<OwnSigns>& all, std::int64_t step) {
  AnomalyFinding finding = finding_of(AnomalyMonitor::gradient_not_finite, step);
  finding.value = std::numeric_limits<double>::quiet_NaN();
  finding.where = "after the sum over the ranks";
  int lowest = std::numeric_limits<int>::max();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const OwnSigns& own = all[static_cast<std::size_t>(rank)];
    if (finding.rank < 0 && !(own.loss_finite && own.gradient_finite)) {
      finding.rank = rank;
      finding.where = own.loss_finite ? "gradient" : "loss";
    }
    if (own.layer < 0 || std::isfinite(own.value) || own.layer >= lowest) continue;
    lowest = own.layer;
    finding.rank = rank;
    finding.where = fmt::format("output of h.{}", own.layer);
  }
  return finding;
}

}  // namespace

bool AnomalyGuard::State::samples(std::int64_t step) const {
  return (step + 1) % config_.sample_every_steps == 0 || options_.pitfalls.on(Pitfall::monitors_not_sampled);
}

void AnomalyGuard::State::begin_step(std::int64_t step, std::int64_t batch) {
  step_ = step;
  batch_ = batch;
  vouches_ = false;
  sampled_ = samples(step);
  retrying_ = asked_ = false;
  first_.clear();
  found_.clear();
  verdict_ = {};
  activations_.begin_step();
}

void AnomalyGuard::State::see_activation(int layer, TensorView values) {
  if (!sampled_ || !values) return;
  bytes_ += values.size_bytes();
  activations_.see(layer, range_of(values));
}

UpdateDecision AnomalyGuard::State::before_update(const UpdateSigns& signs) {
  if (signs.step != step_) begin_step(signs.step, -1);
  asked_ = true;
  found_ = look_at_step(signs);
  if (found_.empty()) {
    verdict_ = {};
    if (!retrying_) return {};
    AnomalyIncident incident;
    incident.findings = first_;
    incident.step = step_;
    incident.batch = batch_;
    incident.retried = incident.repaired = true;
    incidents_.push_back(std::move(incident));
    return {};
  }
  // A step may be wrong because the state was; then neither the batch nor this computation is to blame.
  for (AnomalyFinding& cause : look_at_state()) found_.push_back(std::move(cause));
  verdict_ = judge(found_, retrying_);
  using Kind = UpdateDecision::Kind;
  switch (verdict_.decision) {
    case AnomalyDecision::go_on: return {};
    case AnomalyDecision::clip_harder: return {Kind::apply, verdict_.clip_factor};
    case AnomalyDecision::retry:
      retrying_ = sampled_ = true;
      first_ = std::move(found_);
      activations_.begin_step();
      return {Kind::retry};
    default: return {Kind::skip};
  }
}

AnomalyGuard::State::Findings AnomalyGuard::State::look_at_step(const UpdateSigns& signs) {
  const PitfallSet& pitfalls = options_.pitfalls;
  const bool first_rank_speaks = pitfalls.on(Pitfall::nan_checked_on_rank_zero);
  const bool own_finite = std::isfinite(signs.loss_sum) && signs.gradient_is_finite;
  if (pitfalls.on(Pitfall::nan_raised_on_one_rank) && !own_finite)
    throw Error(fmt::format("step {}: the loss or the gradient of rank {} is not finite", signs.step + 1, world_.rank()));
  const bool speaks = leads() || !first_rank_speaks;
  std::array<double, 4> sums = {signs.loss_sum, speaks && !own_finite ? 1.0 : 0.0, activations_.lowest_excess() ? 1.0 : 0.0,
                                token_seconds_};
  all_reduce(world_, TensorView(sums.data(), DType::f64, {std::ssize(sums)}), {.purpose = Purpose::other, .name = "guard"});
  loss_ = signs.valid_tokens > 0 ? sums[0] / static_cast<double>(signs.valid_tokens) : 0;
  norm_ = signs.gradient_norm;
  applied_norm_ = norm_ * signs.clip_coefficient;
  Findings findings;
  const bool sum_finite = std::isfinite(loss_) && std::isfinite(norm_);
  const bool not_finite = sums[1] > 0 || (!sum_finite && !first_rank_speaks);
  if (not_finite) findings.push_back(finding_of(AnomalyMonitor::gradient_not_finite, step_));
  if (!not_finite && sum_finite) findings = monitor_.judge(step_, loss_, norm_);
  if (not_finite || sums[2] > 0) name_origins(signs, findings);
  token_seconds_ = sums[3] / world_.size();
  return findings;
}

void AnomalyGuard::State::name_origins(const UpdateSigns& signs, Findings& findings) {
  OwnSigns own{std::isfinite(signs.loss_sum), signs.gradient_is_finite};
  if (const auto excess = activations_.lowest_excess()) {
    own.layer = excess->layer;
    own.value = excess->value;
    own.limit = excess->limit;
  }
  std::vector<OwnSigns> all;
  for (const std::string& bytes : all_gather_bytes(world_, to_bytes(own))) all.push_back(from_bytes<OwnSigns>(bytes));
  if (!findings.empty() && findings.front().monitor == AnomalyMonitor::gradient_not_finite)
    findings.front() = origin_of(all, step_);
  AnomalyFinding lowest = finding_of(AnomalyMonitor::activation_range, step_);
  int layer = -1;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const OwnSigns& other = all[static_cast<std::size_t>(rank)];
    if (other.layer < 0 || (layer >= 0 && other.layer >= layer)) continue;
    layer = other.layer;
    lowest.rank = rank;
    lowest.where = fmt::format("output of h.{}", layer);
    lowest.value = other.value;
    lowest.limit = other.limit;
  }
  if (layer >= 0) findings.push_back(std::move(lowest));
}

AnomalyDecision AnomalyGuard::State::after_step(const StepResult& result, double step_seconds, const std::vector<Span>& spans) {
  if (result.retry) return AnomalyDecision::retry;
  // As the run reports it, to the bit; and where the loss scaler has skipped the step, nobody has been asked.
  loss_ = result.loss;
  norm_ = result.gradient_norm;
  if (!found_.empty()) {
    conclude(found_, verdict_);
    const AnomalyDecision decision = verdict_.decision;
    if (decision == AnomalyDecision::roll_back || decision == AnomalyDecision::give_up) return decision;
  }
  const Findings late = look_behind_step(result, step_seconds, spans);
  if (!late.empty()) {
    const PolicyVerdict verdict = judge(late, true);
    conclude(late, verdict);
    if (verdict.decision == AnomalyDecision::roll_back || verdict.decision == AnomalyDecision::give_up) return verdict.decision;
  }
  const bool about_state = std::ranges::any_of(
      late, [](const AnomalyFinding& finding) { return kind_of(finding.monitor) != FindingKind::performance; });
  vouches_ = sampled_ && !about_state;
  count_step(result, found_.empty() && !about_state);
  return AnomalyDecision::go_on;
}

AnomalyGuard::State::Findings AnomalyGuard::State::look_behind_step(const StepResult& result, double step_seconds,
                                                                    const std::vector<Span>& spans) {
  Findings findings;
  const bool applied = !result.skipped;
  if (applied) weights_.count_update(result.learning_rate, result.gradient_norm * result.clip_coefficient);
  if (sampled_) {
    findings = look_at_state();
    std::vector<RankTimes> times;
    for (const std::string& bytes : all_gather_bytes(world_, to_bytes(performance_.see_spans(spans))))
      times.push_back(from_bytes<RankTimes>(bytes));
    for (AnomalyFinding& finding : performance_.compare(step_, times, world_)) findings.push_back(std::move(finding));
  }
  if (scales_loss_dynamically(options_.config.plan)) {
    const bool overflowed = result.skipped && !asked_;
    if (auto finding = scale_.see(step_, result.loss_scale, overflowed)) findings.push_back(std::move(*finding));
  }
  // What the last step has taken, as all ranks know it by now.
  if (asked_ && token_seconds_ > 0) {
    if (auto finding = performance_.see_throughput(step_, token_seconds_)) findings.push_back(std::move(*finding));
  }
  const bool usual = applied && !retrying_ && result.valid_tokens > 0;
  token_seconds_ = usual ? step_seconds / static_cast<double>(result.valid_tokens) : 0;
  return findings;
}

void AnomalyGuard::State::count_step(const StepResult& result, bool clean) {
  const bool applied = !result.skipped;
  monitor_.end_step(step_, loss_, norm_, clean && applied);
  was_unusual_ = !clean;
  if (clean && applied) {
    activations_.accept();
    for (auto& [checkpoint, steps] : unconfirmed_) ++steps;
    confirm();
  } else if (!clean) {
    for (auto& [checkpoint, steps] : unconfirmed_) steps = 0;
  }
}

}  // namespace tandem
