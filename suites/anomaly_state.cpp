// SPDX-License-Identifier: Apache-2.0
// Silent corruption of a copy of the state, and what becomes a checkpoint: nothing that is unsound, and never fewer healthy ones
// than one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "core/io/safetensors.h"
#include "optimized/anomaly/ledger.h"
#include "optimized/anomaly/monitors.h"
#include "optimized/checkpoint/catalogue.h"
#include "suites/anomaly_cases.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

using Cause = reference::ScriptedAnomaly::Cause;

// One look at the state lies between the fault and the next checkpoint or the one after.
constexpr std::int64_t kStruck = 21;

constexpr std::int64_t kOverflows = 10;

double elements_not_finite(const reference::State& state) {
  double count = 0;
  for (const auto& [name, tensor] : state.tensors) {
    if (tensor.dtype != DType::f32) continue;
    for (std::size_t at = 0; at + sizeof(float) <= tensor.bytes.size(); at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, &tensor.bytes[at], sizeof(value));
      count += std::isfinite(value) ? 0 : 1;
    }
  }
  return count;
}

// Over every folder of a step that a restart could take.
double unsound_checkpoints(const fs::path& folder) {
  double unsound = 0;
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    unsound += elements_not_finite(reference::assemble(entry.folder)) > 0 ? 1 : 0;
  }
  return unsound;
}

struct FlipTrial {
  int rank = 0;
  FaultTarget target = FaultTarget::weights;
};

void add_flip(const FlipTrial& trial, const WatchedVariant& variant, const RunContext& context, Teller& teller,
              std::vector<Property>& properties) {
  const ScratchFolder scratch("anomaly-flip");
  WatchedScript script = watched_script(variant, context, scratch.path());
  script.faults = {{.kind = FaultKind::flip, .step = kStruck + 1, .rank = trial.rank, .target = trial.target}};
  const TrainReport report = run_watched(script, context);
  const std::string label = fmt::format("{}, rank {}", name(trial.target), trial.rank);
  properties.push_back(
      exactly(fmt::format("incidents ({})", label), static_cast<double>(report.incidents.size()), 1, "one flip"));
  if (report.incidents.empty()) return;
  const AnomalyIncident& incident = report.incidents.front();
  properties.push_back({fmt::format("delay_steps ({})", label), static_cast<double>(incident.step - kStruck), Relation::at_most,
                        static_cast<double>(script.config.anomaly.sample_every_steps), incident.describe(), -1, ""});
  // The same look may say more of it.
  const auto by_copies = std::ranges::find(incident.findings, AnomalyMonitor::replica_divergence, &AnomalyFinding::monitor);
  const bool found = by_copies != incident.findings.end();
  properties.push_back(exactly(fmt::format("found_by_comparing_copies ({})", label), found ? 1 : 0, 1, incident.describe()));
  const bool nameable = variant.degrees.data > 2;
  properties.push_back(exactly(fmt::format("rank ({})", label), found ? by_copies->rank : std::nan(""),
                               nameable ? trial.rank : -1,
                               nameable ? "two copies against one" : "of two copies none is the odd one"));
  const reference::PolicyOutcome story = story_of(script, {{Cause::state, incident.step}});
  const CheckpointRun& truth = teller.tell(script, story);
  add_course(label, report, story, properties);
  properties.push_back(same_steps(label, report, truth));
  properties.push_back(equal_to_told(label, script, truth));
}

Case flip_case(const std::string& name, const WatchedVariant& variant, const std::vector<FlipTrial>& trials) {
  Case result = anomaly_case("flip/" + name, "a bit of one copy of the state: found by comparing copies, rolled back", variant);
  result.execute = [variant, trials](const RunContext& context) {
    CaseEvidence evidence;
    Teller teller(context);
    for (const FlipTrial& trial : trials) add_flip(trial, variant, context, teller, evidence.properties);
    return evidence;
  };
  return result;
}

// NaN in one rank's weights in the step before a save, and nobody but the look before the save can see it in time: training goes
// on as the action says.
void add_unsound(AnomalyAction action, const RunContext& context, std::vector<Property>& properties) {
  const WatchedVariant variant{.degrees = {.data = 2}, .action = action};
  const ScratchFolder scratch("anomaly-unsound");
  WatchedScript script = watched_script(variant, context, scratch.path());
  script.config.checkpoint_keep = 2;
  script.faults = {{.kind = FaultKind::nan, .step = 20, .rank = 1, .target = FaultTarget::moments}};
  const TrainReport report = run_watched(script, context);
  const std::string label = action == AnomalyAction::report ? "report" : "rollback";
  const auto whole = static_cast<double>(list_checkpoints(scratch.path()).size());
  properties.push_back(exactly(fmt::format("unsound_checkpoints ({})", label), unsound_checkpoints(scratch.path()), 0,
                               "none that a restart could take holds a number that is none"));
  properties.push_back({fmt::format("checkpoints ({})", label), whole, Relation::at_least, 2.0, "and two are kept", -1, ""});
  properties.push_back({fmt::format("incidents ({})", label), static_cast<double>(report.incidents.size()), Relation::at_least,
                        1.0, "and it is said", -1, report.incidents.empty() ? "" : report.incidents.front().describe()});
  if (action == AnomalyAction::report || report.incidents.empty()) return;
  const AnomalyIncident& incident = report.incidents.front();
  const reference::PolicyOutcome story = story_of(script, {{Cause::state, incident.step}});
  const CheckpointRun truth = told_run(script, story, context);
  add_course(label, report, story, properties);
  properties.push_back(equal_to_told(label, script, truth));
}

Case unsound_case() {
  const WatchedVariant variant{.degrees = {.data = 2}};
  Case result = anomaly_case("unsound", "a state with NaN in it never becomes a checkpoint, whatever is done about it", variant);
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    for (const AnomalyAction action : {AnomalyAction::report, AnomalyAction::rollback}) {
      add_unsound(action, context, evidence.properties);
    }
    return evidence;
  };
  return result;
}

constexpr std::int64_t kGarbageFrom = 32;
constexpr std::int64_t kGarbageSteps = 47;

// Where the loss was found to spike, and where it is suspicious by the definition.
Property spikes_as_defined(const TrainReport& report, const AnomalyConfig& config) {
  std::set<std::int64_t> found;
  for (const AnomalyIncident& incident : report.incidents) {
    for (const AnomalyFinding& finding : incident.findings) {
      if (finding.monitor == AnomalyMonitor::loss_spike) found.insert(finding.step);
    }
  }
  std::vector<double> losses;
  for (const StepResult& step : report.steps) losses.push_back(step.loss);
  const reference::OutlierRule rule{config.window, config.window, config.threshold, StepMonitor::kLossFloor};
  std::set<std::int64_t> defined;
  for (const std::size_t step : reference::suspicious_steps(losses, rule)) defined.insert(static_cast<std::int64_t>(step));
  return exactly("spikes_are_those_of_the_definition", found == defined && !defined.empty() ? 1 : 0, 1,
                 fmt::format("[{}] by sorting the whole series, found [{}]", fmt::join(defined, ", "), fmt::join(found, ", ")));
}

// Garbage from a batch on, said and trained on: no later checkpoint is confirmed, and two are kept beside the healthy one.
CaseEvidence garbage_to_the_end(const WatchedVariant& variant, const RunContext& context) {
  const ScratchFolder scratch("anomaly-survivor");
  WatchedScript script = watched_script(variant, context, scratch.path());
  script.config.checkpoint_keep = 2;
  std::vector<reference::ScriptedAnomaly> anomalies;
  for (std::int64_t batch = kGarbageFrom; batch < kGarbageSteps; ++batch) {
    Fault fault;
    fault.kind = FaultKind::poison;
    fault.step = 0;
    fault.batch = batch;
    script.faults.push_back(fault);
    anomalies.push_back({Cause::data, batch});
  }
  const std::int64_t newest = *story_of(script, anomalies).healthy.rbegin();
  const TrainReport report = run_watched(script, context);
  const std::set<std::int64_t> known = read_anomaly_ledger(scratch.path()).healthy_steps;
  std::set<std::int64_t> there;
  for (const CheckpointEntry& entry : list_checkpoints(scratch.path())) there.insert(entry.step);
  CaseEvidence evidence;
  evidence.properties = {
      spikes_as_defined(report, script.config.anomaly),
      exactly("newest_healthy_is_there", there.contains(newest) ? 1 : 0, 1,
              fmt::format("of {} steps; there are [{}]", newest, fmt::join(there, ", "))),
      exactly("newest_healthy_is_known", known.empty() || *known.rbegin() != newest ? 0 : 1, 1,
              fmt::format("confirmed by the steps behind it, and no later one is; known are [{}]", fmt::join(known, ", "))),
      exactly("later_ones", static_cast<double>(std::distance(there.upper_bound(newest), there.end())), 2,
              "as many as are kept")};
  return evidence;
}

Case survivor_case() {
  const WatchedVariant variant{.degrees = {.data = 2}, .steps = kGarbageSteps, .action = AnomalyAction::report, .retry = false};
  Case result = anomaly_case(
      "survivor", "garbage without end: spikes as defined, and the last healthy checkpoint outlives all later ones", variant);
  result.execute = [variant](const RunContext& context) { return garbage_to_the_end(variant, context); };
  return result;
}

// Ten overflows in a row: a thousandth of the scale is left.
Case collapse_case() {
  const WatchedVariant variant{.degrees = {.data = 2}, .precision = "fp16"};
  Case result = anomaly_case("scale_collapse", "a loss scale that falls and falls is no overflow any more", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("anomaly-collapse");
    WatchedScript script = watched_script(variant, context, scratch.path());
    for (std::int64_t step = kStruck; step < kStruck + kOverflows; ++step) {
      script.faults.push_back({.kind = FaultKind::nan, .step = step + 1, .rank = 1});
    }
    const TrainReport report = run_watched(script, context);
    CaseEvidence evidence;
    evidence.properties.push_back(exactly("incidents", static_cast<double>(report.incidents.size()), 1, "one collapse"));
    if (report.incidents.empty()) return evidence;
    const AnomalyIncident& incident = report.incidents.front();
    const AnomalyFinding& first = incident.findings.at(0);
    evidence.properties.push_back(
        exactly("found_as_collapse", first.monitor == AnomalyMonitor::scale_collapse ? 1 : 0, 1, first.describe()));
    evidence.properties.push_back(exactly("overflows_before", static_cast<double>(incident.step - kStruck + 1), kOverflows,
                                          "each alone is the scaler's business"));
    const reference::PolicyOutcome story = story_of(script, {{Cause::state, incident.step}});
    const CheckpointRun truth = told_run(script, story, context);
    add_course("collapse", report, story, evidence.properties);
    evidence.properties.push_back(same_steps("collapse", report, truth));
    evidence.properties.push_back(equal_to_told("collapse", script, truth));
    return evidence;
  };
  return result;
}

}  // namespace

void add_anomaly_state_cases(CaseList& cases) {
  using enum FaultTarget;
  const WatchedVariant data3{.degrees = {.data = 3}};
  cases.push_back(flip_case("data3", data3, {{0, weights}, {1, weights}, {2, moments}}));
  cases.push_back(flip_case("data2/bf16", {.degrees = {.data = 2}, .precision = "bf16"}, {{1, weights}}));
  cases.push_back(flip_case("tensor2_data3", {.degrees = {.data = 3, .tensor = 2}}, {{5, moments}}));
  cases.push_back(unsound_case());
  cases.push_back(survivor_case());
  cases.push_back(collapse_case());
}

}  // namespace tandem
