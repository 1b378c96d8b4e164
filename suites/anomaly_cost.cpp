// SPDX-License-Identifier: Apache-2.0
// What the monitors look at and what that takes; ranks and links that become slow.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/synthetic_corpus.h"
#include "suites/anomaly_cases.h"
#include "suites/anomaly_probe.h"
#include "suites/timing.h"

namespace tandem {
namespace {

// ---- bytes

// Parameters, both moments and the outputs of the blocks, each once in a sampled step; nothing else between.
Case bytes_case() {
  const WatchedVariant variant{.degrees = {.data = 2}, .steps = 32, .action = AnomalyAction::report};
  Case result = anomaly_case("bytes", "what the monitors read: all of the state, once every sample_every_steps", variant);
  result.execute = [variant](const RunContext& context) {
    CaseEvidence evidence;
    for (const std::int64_t every : {4, 16}) {
      const WatchedScript watched = watched_script(variant, context, {});
      ProbeScript script{.config = watched.config, .data = watched.data};
      script.config.anomaly.sample_every_steps = every;
      const ProbeRun run = run_probe(script, context);
      const GptConfig& model = script.config.model;
      const std::int64_t state = 3 * num_parameters(model) * std::int64_t{sizeof(float)};
      const std::int64_t rows = script.config.plan.batch.rows / variant.degrees.data;
      const std::int64_t outputs = model.layers * rows * model.sequence * model.hidden * std::int64_t{sizeof(float)};
      const std::int64_t looks = variant.steps / every;
      evidence.properties.push_back(
          exactly(fmt::format("bytes_looked_at (every {})", every), static_cast<double>(run.guard_bytes),
                  static_cast<double>(looks * (state + outputs)),
                  fmt::format("{} looks at {} bytes of parameters and moments and {} of activations, in {} steps", looks, state,
                              outputs, variant.steps)));
    }
    return evidence;
  };
  return result;
}

// ---- slow

struct Slowness {
  Fault fault;
  std::vector<AnomalyMonitor> monitors;  // any of them
};

Case slow_case() {
  const WatchedVariant variant{.degrees = {.data = 3}, .steps = 30, .action = AnomalyAction::report};
  Case result = anomaly_case(
      "slow", "a rank that computes slowly, and one whose messages are late: said, named, nothing else done", variant);
  result.execute = [variant](const RunContext& context) {
    using enum AnomalyMonitor;
    const Fault slow{.kind = FaultKind::slow, .step = 22, .rank = 1, .milliseconds = 50, .count = 6};
    const Fault late{.kind = FaultKind::jitter, .step = 22, .rank = 1, .milliseconds = 10, .count = 6};
    CaseEvidence evidence;
    Teller teller(context);
    for (const Slowness& slowness :
         {Slowness{slow, {slow_rank}}, Slowness{late, {slow_collective, slow_rank, throughput_drop}}}) {
      const std::string label(name(slowness.fault.kind));
      WatchedScript script = watched_script(variant, context, {});
      script.timed = true;
      script.config.anomaly.sample_every_steps = 1;
      script.faults = {slowness.fault};
      const TrainReport report = run_watched(script, context);
      double found = 0;
      double named = 0;
      std::string first;
      for (const AnomalyIncident& incident : report.incidents) {
        for (const AnomalyFinding& finding : incident.findings) {
          if (std::ranges::find(slowness.monitors, finding.monitor) == slowness.monitors.end()) continue;
          found = 1;
          named = std::max(named, finding.rank == slowness.fault.rank ? 1.0 : 0.0);
          first += (first.empty() ? "" : "; ") + finding.describe();
        }
      }
      evidence.properties.push_back(exactly(fmt::format("found ({})", label), found, 1, first));
      evidence.properties.push_back(exactly(fmt::format("rank ({})", label), named, 1, first));
      const CheckpointRun& truth = teller.tell(script, story_of(script, {}));
      evidence.properties.push_back(same_steps(label, report, truth));
    }
    return evidence;
  };
  return result;
}

// ---- seconds

Case time_case() {
  WatchedVariant variant{.degrees = {.data = 2}, .steps = 1000, .action = AnomalyAction::rollback};
  Case result = anomaly_case("time", "a step with the monitors on over one without", variant);
  result.model.vocabulary = 256;
  result.model.sequence = 64;
  result.model.hidden = 128;
  result.plan.batch = {64, 1};
  result.quick = false;
  result.timed = true;
  result.unavailable = [](const RunContext&) { return too_busy_to_time(); };
  result.execute = [=, model = result.model, batch = result.plan.batch](const RunContext& context) {
    constexpr int kTurns = 8;
    WatchedScript watched = watched_script(variant, context, {});
    ProbeScript script{.config = watched.config,
                       .data = std::make_shared<SyntheticCorpus>(
                           SyntheticOptions{.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = context.seed})};
    script.config.model = model;
    script.config.plan.batch = batch;
    script.config.anomaly = {};
    script.config.anomaly.retry = false;
    const GuardTimes times = time_guard(script, kTurns, script.config.anomaly.sample_every_steps, context);
    const double watched_seconds = *std::ranges::min_element(times.watched_seconds);
    const double unwatched_seconds = *std::ranges::min_element(times.unwatched_seconds);
    const auto steps = static_cast<double>(script.config.anomaly.sample_every_steps);
    CaseEvidence evidence;
    evidence.properties = {{"watched_over_unwatched", watched_seconds / unwatched_seconds, Relation::at_most, 1.01,
                            fmt::format("{} steps, one of them sampled; least of {} turns: {:.3f} ms against {:.3f} ms a step",
                                        steps, kTurns, 1e3 * watched_seconds / steps, 1e3 * unwatched_seconds / steps),
                            -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_anomaly_cost_cases(CaseList& cases) {
  cases.push_back(bytes_case());
  cases.push_back(slow_case());
  cases.push_back(time_case());
}

}  // namespace tandem
