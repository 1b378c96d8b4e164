// SPDX-License-Identifier: Apache-2.0
// What is done about a bad batch: by the letter of the policy, once, for good, and not for ever.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/dtype.h"
#include "optimized/checkpoint/catalogue.h"
#include "suites/anomaly_cases.h"
#include "suites/kept_training.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

using Cause = reference::ScriptedAnomaly::Cause;

constexpr std::int64_t kBad = 23;  // batch; without an earlier one left out it is the step as well

const WatchedVariant kData2{.degrees = {.data = 2}};

Fault poison(std::int64_t batch) {
  Fault fault;
  fault.kind = FaultKind::poison;
  fault.step = 0;
  fault.batch = batch;
  return fault;
}

double final_loss(const TrainReport& report) {
  return report.validation_losses.empty() ? std::nan("") : report.validation_losses.back().second;
}

Case poison_case() {
  Case result = anomaly_case("poison/rollback", "a batch of garbage is left out for good, as if it had been known", kData2);
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("anomaly-poison");
    WatchedScript script = watched_script(kData2, context, scratch.path());
    script.faults = {poison(kBad)};
    const reference::PolicyOutcome story = story_of(script, {{Cause::data, kBad}});
    const TrainReport report = run_watched(script, context);
    const CheckpointRun truth = told_run(script, story, context);
    CaseEvidence evidence;
    add_course("garbage", report, story, evidence.properties);
    evidence.properties.push_back(same_steps("garbage", report, truth));
    evidence.properties.push_back(equal_to_told("garbage", script, truth));
    const ScratchFolder clean_folder("anomaly-clean");
    const TrainReport clean = run_watched(watched_script(kData2, context, clean_folder.path()), context);
    // One batch of 36 is another; the noise of the validation loss over batches is what the two may differ by.
    evidence.properties.push_back({"validation_loss_over_undisturbed", final_loss(report) / final_loss(clean), Relation::at_most,
                                   1.02, "one batch in 36 is another one", -1, ""});
    return evidence;
  };
  return result;
}

double relative_difference(const std::vector<double>& values, const std::vector<double>& truth) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    difference += (values.at(i) - truth[i]) * (values[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  return std::sqrt(difference / norm);
}

// The definition of an undisturbed run: the reference's training loop, which is told from the start.
Case reference_case() {
  Case result = anomaly_case("poison/reference", "a run that rolled back against the reference that never saw the batch", kData2);
  result.quick = false;
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("anomaly-reference");
    WatchedScript script = watched_script(kData2, context, scratch.path());
    script.faults = {poison(kBad)};
    const TrainReport report = run_watched(script, context);
    PairInputs inputs;
    inputs.model = script.config.model;
    inputs.plan = script.config.plan;
    inputs.optimizer = script.config.optimizer;
    inputs.schedule = script.config.schedule;
    inputs.steps = script.config.steps;
    inputs.seed = script.config.seed;
    inputs.initialization = script.config.initialization;
    inputs.data = script.data;
    const reference::TrainingRun told = reference::without_batches(reference_run(inputs), {kBad});
    const std::vector<double> truth = kept_training<double>(told)->losses;
    const std::vector<double> yardstick = kept_training<float>(told)->losses;
    std::vector<double> found;
    for (const StepResult& step : report.steps) found.push_back(step.loss);
    const double own = relative_difference(yardstick, truth);
    const double floor = unit_roundoff(DType::f32) * std::sqrt(static_cast<double>(script.config.model.hidden));
    CaseEvidence evidence;
    evidence.properties = {{"losses_against_the_reference", relative_difference(found, truth), Relation::at_most,
                            4 * std::max(own, floor), "4 x the larger of the fp32 reference's own error and eps sqrt(hidden)", -1,
                            ""}};
    return evidence;
  };
  return result;
}

// The run goes on in a new process, as after a signal, and is ended the same way after so many steps.
TrainReport attempt(WatchedScript script, std::int64_t stop_after, const RunContext& context) {
  script.stop_after = stop_after;
  script.resume = find_checkpoint(script.folder, {}, context.pitfalls);
  return run_watched(script, context);
}

double rollbacks_of(const TrainReport& report) {
  double rollbacks = 0;
  for (const AnomalyIncident& incident : report.incidents) {
    rollbacks += incident.decision == AnomalyDecision::roll_back ? 1 : 0;
  }
  return rollbacks;
}

Case restart_case() {
  Case result = anomaly_case("poison/restarts",
                             "two restarts later the batches are still left out, and nothing is rolled back again", kData2);
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("anomaly-restarts");
    WatchedScript script = watched_script(kData2, context, scratch.path());
    script.faults = {poison(kBad), poison(kBad + 2)};
    const reference::PolicyOutcome story = story_of(script, {{Cause::data, kBad}, {Cause::data, kBad + 2}});
    script.stop_after = 29;
    double rollbacks = rollbacks_of(run_watched(script, context));
    // What came behind the bad batches is lost: the second attempt comes by them once more.
    for (const CheckpointEntry& entry : list_checkpoints(scratch.path())) {
      if (entry.step > kBad) std::filesystem::remove_all(entry.folder);
    }
    rollbacks += rollbacks_of(attempt(script, 33, context));
    const TrainReport report = attempt(script, 0, context);
    rollbacks += rollbacks_of(report);
    const CheckpointRun truth = told_run(script, story, context);
    CaseEvidence evidence;
    evidence.properties = {exactly("rollbacks_of_three_attempts", rollbacks, 2, "one for each bad batch, ever"),
                           exactly("left_out_as_told", report.skipped_batches == story.skipped ? 1 : 0, 1,
                                   fmt::format("batches [{}] and no other", fmt::join(story.skipped, ", "))),
                           same_steps("third attempt", report, truth), equal_to_told("third attempt", script, truth)};
    return evidence;
  };
  return result;
}

// Garbage from a batch on: leaving batches out does not help.
Case give_up_case() {
  Case result = anomaly_case("give_up", "a fault that comes back with every batch ends the run, with a report", kData2);
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("anomaly-give-up");
    WatchedScript script = watched_script(kData2, context, scratch.path());
    script.config.anomaly.max_rollbacks = 2;
    std::vector<reference::ScriptedAnomaly> anomalies;
    for (std::int64_t batch = kBad; batch < script.config.steps + 10; ++batch) {
      script.faults.push_back(poison(batch));
      anomalies.push_back({Cause::data, batch});
    }
    const reference::PolicyOutcome story = story_of(script, anomalies);
    const TrainReport report = run_watched(script, context);
    CaseEvidence evidence;
    add_course("garbage from a batch on", report, story, evidence.properties);
    evidence.properties.push_back(exactly("incidents", static_cast<double>(report.incidents.size()),
                                          static_cast<double>(story.rollbacks.begin()->second + 1),
                                          "each rollback, and the end"));
    const bool told = !report.incidents.empty() && report.incidents.back().decision == AnomalyDecision::give_up &&
                      !report.incidents.back().bundle.empty();
    evidence.properties.push_back(exactly("ends_with_a_report", told ? 1 : 0, 1, "the last incident says so, and replays"));
    return evidence;
  };
  return result;
}

std::string word(AnomalyAction action) {
  if (action == AnomalyAction::report) return "report";
  return action == AnomalyAction::skip ? "skip" : "clip";
}

// The same garbage under a cheaper action, which leaves the order of the batches alone.
void add_action(AnomalyAction action, const RunContext& context, std::vector<Property>& properties) {
  const ScratchFolder scratch("anomaly-actions");
  WatchedScript script = watched_script(kData2, context, scratch.path());
  script.config.anomaly.action = action;
  script.faults = {poison(kBad)};
  const reference::PolicyOutcome story = story_of(script, {{Cause::data, kBad}});
  const TrainReport report = run_watched(script, context);
  add_course(word(action), report, story, properties);
  WatchedScript garbage = script;
  const std::shared_ptr<FaultInjector> injector = make_injector(script);
  garbage.data = injector->poisoned(*script.data);
  const CheckpointRun truth = told_run(garbage, story, context);
  properties.push_back(same_steps(word(action), report, truth));
  properties.push_back(equal_to_told(word(action), script, truth));
  if (report.steps.size() <= static_cast<std::size_t>(kBad)) return;
  const StepResult& bad = report.steps[kBad];
  properties.push_back(exactly(fmt::format("left_out ({})", word(action)), bad.skipped ? 1 : 0,
                               action == AnomalyAction::skip ? 1 : 0, "the update of the step alone"));
  const double kept = bad.clip_coefficient * bad.gradient_norm;
  const double before = report.steps[kBad - 1].clip_coefficient * report.steps[kBad - 1].gradient_norm;
  if (action != AnomalyAction::clip) return;
  properties.push_back({"clipped_norm_over_that_of_the_step_before", kept / before, Relation::at_most, 2.0,
                        fmt::format("a gradient of norm {:.3g} is made as large as usual", bad.gradient_norm), -1, ""});
}

Case actions_case() {
  Case result = anomaly_case("actions", "garbage under report, skip and clip: each does what its letter says", kData2);
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    for (const AnomalyAction action : {AnomalyAction::report, AnomalyAction::skip, AnomalyAction::clip}) {
      add_action(action, context, evidence.properties);
    }
    return evidence;
  };
  return result;
}

// The learning rate of one step is a hundred times too high: the step looks well, those behind it do not.
Case spike_case() {
  Case result = anomaly_case("spike", "one step at a hundred times the learning rate: found behind it, and undone", kData2);
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("anomaly-spike");
    WatchedScript script = watched_script(kData2, context, scratch.path());
    Fault fault;
    fault.kind = FaultKind::spike;
    fault.step = kBad + 1;
    fault.factor = 100;
    script.faults = {fault};
    const TrainReport report = run_watched(script, context);
    CaseEvidence evidence;
    evidence.properties.push_back(exactly("incidents", static_cast<double>(report.incidents.size()), 1, "one fault"));
    if (report.incidents.empty()) return evidence;
    const AnomalyIncident& incident = report.incidents.front();
    evidence.properties.push_back({"delay_steps", static_cast<double>(incident.step - kBad), Relation::at_most, 2.0,
                                   incident.findings.at(0).describe(), -1, ""});
    // The step in which it shows is as wrong the second time: its batch goes, though the weights were to blame.
    const reference::PolicyOutcome story = story_of(script, {{Cause::machine, incident.step, 2}});
    const CheckpointRun truth = told_run(script, story, context);
    add_course("spike", report, story, evidence.properties);
    evidence.properties.push_back(same_steps("spike", report, truth));
    evidence.properties.push_back(equal_to_told("spike", script, truth));
    return evidence;
  };
  return result;
}

}  // namespace

void add_anomaly_policy_cases(CaseList& cases) {
  cases.push_back(poison_case());
  cases.push_back(reference_case());
  cases.push_back(restart_case());
  cases.push_back(give_up_case());
  cases.push_back(actions_case());
  cases.push_back(spike_case());
}

}  // namespace tandem
