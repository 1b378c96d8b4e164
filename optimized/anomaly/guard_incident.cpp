// SPDX-License-Identifier: Apache-2.0
// What follows from a finding: the decision, the ledger, the bundle.
#include <algorithm>
#include <exception>
#include <system_error>
#include <tuple>

#include <fmt/format.h>
#include <cereal/types/utility.hpp>

#include "core/io/binary.h"
#include "optimized/anomaly/bundle.h"
#include "optimized/anomaly/guard_state.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/comm/exchange.h"

namespace tandem {

template <class Archive>
void serialize(Archive& archive, AnomalyLedger& ledger) {
  std::vector<std::int64_t> skipped(ledger.skipped_batches.begin(), ledger.skipped_batches.end());
  std::vector<std::int64_t> healthy(ledger.healthy_steps.begin(), ledger.healthy_steps.end());
  archive(skipped, healthy, ledger.rollbacks, ledger.incidents);
  ledger.skipped_batches = {skipped.begin(), skipped.end()};
  ledger.healthy_steps = {healthy.begin(), healthy.end()};
}

namespace {

namespace fs = std::filesystem;

// Of a run that goes on in a state that is wrong, every step is one.
constexpr std::size_t kMostIncidents = 10000;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// So that what is no checkpoint any more is one reason, whatever else the file system says about it.
bool verifies(const fs::path& folder) {
  try {
    return !find_damage(folder, VerifyDepth::contents);
  } catch (const std::exception&) {
    return false;
  }
}

bool is_performance(const AnomalyFinding& finding) { return kind_of(finding.monitor) == FindingKind::performance; }

// What the first rank has, on all.
template <class Value>
Value of_first_rank(Communicator& world, const Value& own) {
  return from_bytes<Value>(all_gather_bytes(world, world.rank() == 0 ? to_bytes(own) : std::string()).front());
}

}  // namespace

AnomalyGuard::State::State(AnomalyGuardOptions options, Engine& engine)
    : options_(std::move(options)),
      config_(options_.config.anomaly),
      engine_(engine),
      world_(*engine.context().world),
      files_(options_.files != nullptr ? *options_.files : system_files()),
      monitor_(config_, options_.pitfalls),
      scale_(config_.window) {
  if (!is_on() || options_.folder.empty()) return;
  std::pair<AnomalyLedger, std::string> read;
  if (leads()) {
    try {
      read.first = read_anomaly_ledger(options_.folder);
    } catch (const std::exception& error) {
      read.second = error.what();
    }
  }
  read = of_first_rank(world_, read);
  if (!read.second.empty()) throw InputError(read.second);
  ledger_ = std::move(read.first);
  if (options_.starts_anew && ledger_ != AnomalyLedger()) {
    ledger_ = {.skipped_batches = {}, .healthy_steps = {}, .rollbacks = {}, .incidents = ledger_.incidents};
    share_ledger();
  }
  // The run goes on from before them: they are of another course.
  std::erase_if(ledger_.healthy_steps, [this](std::int64_t step) { return step > options_.first_step; });
  if (options_.first_step > 0) unconfirmed_.try_emplace(options_.first_step, 0);
}

std::int64_t AnomalyGuard::State::rollback_step() const noexcept {
  return ledger_.newest_healthy().value_or(options_.first_step);
}

PolicyVerdict AnomalyGuard::State::judge(const Findings& findings, bool retried) {
  PolicyFacts facts;
  facts.retried = retried;
  if (std::ranges::all_of(findings, is_performance)) return {};
  const PolicyVerdict first = decide(config_, findings, facts, options_.pitfalls);
  if (first.decision == AnomalyDecision::retry) return first;
  resolve_target();
  facts.can_go_back = target_.has_value();
  if (target_) {
    const auto times = ledger_.rollbacks.find(*target_);
    facts.rollbacks_there = times == ledger_.rollbacks.end() ? 0 : times->second;
  }
  facts.applied_norm = applied_norm_;
  facts.usual_norm = monitor_.median_norm();
  return decide(config_, findings, facts, options_.pitfalls);
}

// Where a run can go back to: the newest healthy checkpoint that verifies, one that is still being written included; else where
// this attempt began. Of rank 0: the others have no folder to look at.
std::optional<std::int64_t> AnomalyGuard::State::find_target() const {
  if (options_.folder.empty()) return std::nullopt;
  const std::vector<std::int64_t> newest_first(ledger_.healthy_steps.rbegin(), ledger_.healthy_steps.rend());
  for (const std::int64_t step : newest_first) {
    if (!is_written_or_being_written(options_.folder, step)) continue;
    const fs::path folder = options_.folder / step_folder_name(step);
    if (!is_there(folder) || verifies(folder)) return step;
  }
  return options_.first_step;
}

void AnomalyGuard::State::resolve_target() {
  const std::int64_t found = leads() ? find_target().value_or(-1) : -1;
  const auto shared = static_cast<std::int64_t>(all_gather_u64(world_, static_cast<std::uint64_t>(found)).front());
  target_ = shared < 0 ? std::nullopt : std::optional(shared);
}

// What has been said of the state once, and is let be, is not said again at each look.
bool AnomalyGuard::State::is_new(const Findings& findings) {
  bool any = false;
  for (const AnomalyFinding& finding : findings) {
    const FindingKind kind = kind_of(finding.monitor);
    const bool about_state = kind == FindingKind::broken || kind == FindingKind::doubtful;
    const std::string text = fmt::format("{} {} {}", name(finding.monitor), finding.rank, finding.where);
    any = (about_state ? known_.insert(text).second : true) || any;
  }
  return any;
}

void AnomalyGuard::State::conclude(const Findings& findings, const PolicyVerdict& verdict, bool unsaved) {
  const bool is_let_be = verdict.decision == AnomalyDecision::go_on || verdict.decision == AnomalyDecision::skip_step;
  const bool is_known = !is_new(findings) && is_let_be;
  // Of checkpoints that are not written, each is told.
  if (is_known && !unsaved) return;
  AnomalyIncident incident;
  incident.findings = findings;
  incident.decision = verdict.decision;
  incident.step = step_;
  incident.batch = batch_;
  incident.retried = retrying_;
  incident.unsaved = unsaved;
  // The bundle is of the run as it was: its list does not have the batch yet.
  const bool goes_on_as_before = is_known || (was_unusual_ && verdict.decision == AnomalyDecision::go_on);
  const bool with_bundle = !std::ranges::all_of(findings, is_performance) && !goes_on_as_before;
  incident.problem = write_down(incident, with_bundle);
  if (verdict.decision == AnomalyDecision::roll_back) {
    incident.rolled_back_to = target_;
    ++ledger_.rollbacks[*target_];
    std::erase_if(ledger_.healthy_steps, [this](std::int64_t step) { return step > *target_; });
    // None of them is there and verifies: rollback_step() must not name one.
    if (!ledger_.healthy_steps.contains(*target_)) ledger_.healthy_steps.clear();
    if (verdict.skip_batch && batch_ >= 0) {
      ledger_.skipped_batches.insert(batch_);
      incident.skipped_batch = batch_;
    }
  }
  if (with_bundle) share_ledger();
  if (goes_on_as_before && incidents_.size() >= kMostIncidents) return;
  if (incident.problem.empty()) incident.problem = ledger_problem_;
  incidents_.push_back(std::move(incident));
}

// The bundle, where there is to be one; what kept it from being written.
std::string AnomalyGuard::State::write_down(AnomalyIncident& incident, bool with_bundle) {
  if (options_.folder.empty() || !with_bundle) return {};
  ++ledger_.incidents;
  std::pair<std::string, std::string> written;
  if (leads()) {
    try {
      written.first = bundle_of(incident).string();
    } catch (const std::exception& error) {
      written.second = error.what();
    }
  }
  written = of_first_rank(world_, written);
  incident.bundle = written.first;
  return written.second;
}

// The newest place to go back to that a replay can begin at: its checkpoint is written already, or it is the beginning, and this
// attempt knows all steps since. Where there is none the target itself.
std::int64_t AnomalyGuard::State::bundle_start() const {
  const std::int64_t target = target_.value_or(options_.first_step);
  std::set<std::int64_t> places = ledger_.healthy_steps;
  places.insert({target, options_.first_step});
  for (auto place = places.rbegin(); place != places.rend(); ++place) {
    const bool begins_here = *place == options_.first_step && !monitor_.has(*place);
    const bool is_left_behind = *place > target && *place != options_.first_step;
    if (is_left_behind || !(begins_here || monitor_.knows(*place))) continue;
    if (*place == 0 || is_there(options_.folder / step_folder_name(*place))) return *place;
  }
  return target;
}

fs::path AnomalyGuard::State::bundle_of(const AnomalyIncident& incident) {
  IncidentBundle bundle;
  bundle.config = options_.config;
  bundle.data = options_.data;
  bundle.data_identity = options_.data_identity;
  bundle.start_step = bundle_start();
  const std::string checkpoint = step_folder_name(bundle.start_step);
  if (is_there(options_.folder / checkpoint)) bundle.checkpoint = checkpoint;
  bundle.skipped_batches = {ledger_.skipped_batches.begin(), ledger_.skipped_batches.end()};
  bundle.step = incident.step;
  bundle.batch = std::max<std::int64_t>(incident.batch, 0);
  std::tie(bundle.losses, bundle.gradient_norms) = monitor_.since(bundle.start_step);
  // The step itself is counted when it has ended.
  if (!monitor_.has(incident.step)) {
    bundle.losses.push_back(loss_);
    bundle.gradient_norms.push_back(norm_);
  }
  for (const AnomalyFinding& finding : incident.findings) bundle.findings.push_back(finding.describe());
  if (options_.read_batch && incident.batch >= 0) bundle.batch_hash = hash_of(options_.read_batch(incident.batch));
  return write_bundle(options_.folder, ledger_.incidents, bundle, files_);
}

// Steps without a finding since a checkpoint have shown that it is good. One that could not be written is not there to be.
void AnomalyGuard::State::confirm() {
  if (options_.folder.empty()) return;
  bool changed = false;
  for (const auto& [step, steps] : unconfirmed_) {
    if (steps < config_.confirm_steps) continue;
    // Where writing has not begun the next step asks again.
    const bool here = leads() && is_written_or_being_written(options_.folder, step);
    if (all_gather_u64(world_, here ? 1 : 0).front() == 0) continue;
    ledger_.healthy_steps.insert(step);
    changed = true;
  }
  if (!changed) return;
  const std::int64_t newest = *ledger_.newest_healthy();
  std::erase_if(unconfirmed_, [newest](const auto& entry) { return entry.first <= newest; });
  share_ledger();
  monitor_.forget_before(newest);
}

// Written by the first rank; the same on all. What cannot be written now is written with the next change.
void AnomalyGuard::State::share_ledger() {
  if (options_.folder.empty()) return;
  std::string problem;
  if (leads()) {
    const std::int64_t newest = ledger_.newest_healthy().value_or(0);
    std::erase_if(ledger_.healthy_steps,
                  [&](std::int64_t step) { return step < newest && !is_there(options_.folder / step_folder_name(step)); });
    try {
      write_anomaly_ledger(options_.folder, ledger_, files_);
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  std::tie(ledger_, ledger_problem_) = of_first_rank(world_, std::pair(ledger_, problem));
}

AnomalyDecision AnomalyGuard::State::before_save() {
  if (options_.pitfalls.on(Pitfall::unsound_state_saved)) return AnomalyDecision::go_on;
  retrying_ = false;
  const Findings findings = look_at_state();
  if (findings.empty()) return AnomalyDecision::go_on;
  PolicyVerdict verdict = judge(findings, true);
  const bool broken = std::ranges::any_of(
      findings, [](const AnomalyFinding& finding) { return kind_of(finding.monitor) == FindingKind::broken; });
  if (broken && verdict.decision == AnomalyDecision::go_on) verdict.decision = AnomalyDecision::skip_step;
  conclude(findings, verdict, verdict.decision == AnomalyDecision::skip_step);
  for (auto& [checkpoint, steps] : unconfirmed_) steps = 0;
  return verdict.decision;
}

void AnomalyGuard::State::rolled_back() {
  const std::int64_t target = rollback_step();
  monitor_.forget_from(target);
  std::erase_if(unconfirmed_, [target](const auto& entry) { return entry.first > target; });
  for (auto& [checkpoint, steps] : unconfirmed_) steps = 0;
  known_.clear();
  weights_.clear();
  scale_ = ScaleMonitor(config_.window);
  was_unusual_ = false;
  token_seconds_ = 0;
  begin_step(-1, -1);
}

}  // namespace tandem
