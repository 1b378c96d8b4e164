// SPDX-License-Identifier: Apache-2.0
// One number that is none, on each rank in turn: found in its step, on the rank where it arose, and the run ends as if nothing
// had been, or without the batch. docs/techniques/anomaly.md
#include <algorithm>

#include <fmt/format.h>

#include "suites/anomaly_cases.h"

namespace tandem {
namespace {

using Cause = reference::ScriptedAnomaly::Cause;

constexpr std::int64_t kStruck = 23;  // from 0; the checkpoint of 15 steps is healthy by then, that of 20 is not yet

struct Trial {
  int rank = 0;
  FaultTarget target = FaultTarget::gradients;
  bool rank_is_known = true;
};

// What is in the weights is no fault of the step or its batch.
std::vector<reference::ScriptedAnomaly> told(const Trial& trial) {
  return {{trial.target == FaultTarget::weights ? Cause::state : Cause::machine, kStruck, 1, false}};
}

void add_finding(const std::string& label, const Trial& trial, const TrainReport& report, std::vector<Property>& properties) {
  properties.push_back(exactly(fmt::format("incidents ({})", label), static_cast<double>(report.incidents.size()), 1,
                               "one fault, and nothing else that looks like one"));
  if (report.incidents.empty()) return;
  const AnomalyIncident& incident = report.incidents.front();
  properties.push_back(exactly(fmt::format("delay_steps ({})", label), static_cast<double>(incident.step - kStruck), 0,
                               "before anything of it is in the weights"));
  const AnomalyFinding& first = incident.findings.at(0);
  const bool by_gradient = first.monitor == AnomalyMonitor::gradient_not_finite;
  properties.push_back(exactly(fmt::format("found_as_not_finite ({})", label), by_gradient ? 1 : 0, 1, first.describe()));
  if (trial.rank_is_known) {
    properties.push_back(exactly(fmt::format("rank ({})", label), first.rank, trial.rank, "where it arose"));
  }
}

void add_lost_steps(const std::string& label, const TrainReport& report, const RunConfig& config,
                    std::vector<Property>& properties) {
  for (const AnomalyIncident& incident : report.incidents) {
    if (!incident.rolled_back_to) continue;
    const std::int64_t lost = incident.step + 1 - *incident.rolled_back_to;
    properties.push_back({fmt::format("lost_steps ({})", label), static_cast<double>(lost), Relation::at_most,
                          static_cast<double>(config.checkpoint_every_steps + config.anomaly.confirm_steps),
                          "steps between checkpoints, and those that one is confirmed by", -1, ""});
  }
}

void add_trial(const Trial& trial, const WatchedVariant& variant, const RunContext& context, Teller& teller,
               std::vector<Property>& properties) {
  const ScratchFolder scratch("anomaly-nan");
  WatchedScript script = watched_script(variant, context, scratch.path());
  script.faults = {{.kind = FaultKind::nan, .step = kStruck + 1, .rank = trial.rank, .target = trial.target}};
  const reference::PolicyOutcome story = story_of(script, told(trial));
  const TrainReport report = run_watched(script, context);
  const CheckpointRun& truth = teller.tell(script, story);
  const std::string label =
      fmt::format("{}, rank {}, {}", name(trial.target), trial.rank, variant.retry ? "made again" : "not made again");
  add_finding(label, trial, report, properties);
  add_course(label, report, story, properties);
  add_lost_steps(label, report, script.config, properties);
  properties.push_back(same_steps(label, report, truth));
  properties.push_back(equal_to_told(label, script, truth));
}

Case nan_case(const std::string& name, const WatchedVariant& variant, const std::vector<Trial>& trials) {
  Case result = anomaly_case(
      "nan/" + name,
      fmt::format("NaN on each rank: named, {}", variant.retry ? "computed again, as if it had not been" : "rolled back"),
      variant);
  result.execute = [variant, trials](const RunContext& context) {
    CaseEvidence evidence;
    Teller teller(context);
    for (const Trial& trial : trials) add_trial(trial, variant, context, teller, evidence.properties);
    return evidence;
  };
  return result;
}

// With a loss scale one NaN is an overflow, which is the scaler's business; in the weights it is one with every step from then
// on.
void add_scaled(const Trial& trial, const WatchedVariant& variant, const RunContext& context, std::vector<Property>& properties) {
  const ScratchFolder scratch("anomaly-scaled");
  WatchedScript script = watched_script(variant, context, scratch.path());
  script.faults = {{.kind = FaultKind::nan, .step = kStruck + 1, .rank = trial.rank, .target = trial.target}};
  const TrainReport report = run_watched(script, context);
  const std::string label(name(trial.target));
  const bool stays = trial.target == FaultTarget::weights;
  properties.push_back(exactly(fmt::format("incidents ({})", label), static_cast<double>(report.incidents.size()), stays ? 1 : 0,
                               stays ? "the next look at the state finds it" : "an overflow and no incident"));
  const auto skipped = static_cast<double>(std::ranges::count_if(report.steps, &StepResult::skipped));
  properties.push_back(exactly(fmt::format("skipped_steps ({})", label), skipped, stays ? 0 : 1,
                               stays ? "all of them were rolled back" : "by the loss scaler"));
  if (!stays || report.incidents.empty()) return;
  const AnomalyIncident& incident = report.incidents.front();
  const AnomalyFinding& first = incident.findings.at(0);
  properties.push_back(exactly(fmt::format("found_in_the_state ({})", label),
                               first.monitor == AnomalyMonitor::weight_not_finite ? 1 : 0, 1, first.describe()));
  properties.push_back(exactly(fmt::format("rank ({})", label), first.rank, trial.rank, "whose weights they are"));
  properties.push_back({fmt::format("delay_steps ({})", label), static_cast<double>(incident.step - kStruck), Relation::at_most,
                        static_cast<double>(script.config.anomaly.sample_every_steps), "one look in so many steps", -1, ""});
  const reference::PolicyOutcome story = story_of(script, {{Cause::state, incident.step}});
  const CheckpointRun truth = told_run(script, story, context);
  add_course(label, report, story, properties);
  properties.push_back(same_steps(label, report, truth));
  properties.push_back(equal_to_told(label, script, truth));
}

Case scaled_case() {
  const WatchedVariant variant{.degrees = {.data = 2}, .precision = "fp16"};
  Case result =
      anomaly_case("nan/fp16", "NaN under a loss scale: an overflow where it passes, an incident where it stays", variant);
  result.execute = [variant](const RunContext& context) {
    CaseEvidence evidence;
    add_scaled({1, FaultTarget::gradients}, variant, context, evidence.properties);
    add_scaled({1, FaultTarget::weights}, variant, context, evidence.properties);
    return evidence;
  };
  return result;
}

}  // namespace

void add_anomaly_cases(CaseList& cases) {
  using enum FaultTarget;
  WatchedVariant data3{.degrees = {.data = 3}};
  cases.push_back(nan_case("data3", data3, {{0, gradients}, {1, gradients}, {2, gradients}, {1, activations}, {2, weights}}));
  data3.retry = false;
  cases.push_back(nan_case("data3/rollback", data3, {{2, gradients}, {0, activations}}));
  // A rank hands on what it computes to those that share its layers or have the others: theirs is none either.
  cases.push_back(
      nan_case("tensor2", {.degrees = {.tensor = 2}}, {{0, gradients, false}, {1, gradients, false}, {1, activations, false}}));
  cases.push_back(nan_case("pipeline2", {.degrees = {.pipeline = 2}}, {{0, gradients}, {1, gradients}, {0, activations, false}}));
  cases.push_back(
      nan_case("zero3", {.degrees = {.data = 3}, .zero_stage = 3}, {{0, gradients}, {2, gradients}, {1, activations}}));
  cases.push_back(
      nan_case("bf16", {.degrees = {.data = 2}, .precision = "bf16"}, {{1, gradients}, {1, activations}, {0, weights}}));
  cases.push_back(scaled_case());
  add_anomaly_policy_cases(cases);
  add_anomaly_state_cases(cases);
  add_anomaly_detection_cases(cases);
  add_anomaly_cost_cases(cases);
}

}  // namespace tandem
