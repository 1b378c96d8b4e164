// SPDX-License-Identifier: Apache-2.0
// What is found, how late, and by which monitor; how often something is found where nothing is; how far it would have come.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "suites/anomaly_cases.h"
#include "suites/anomaly_probe.h"

namespace tandem {
namespace {

constexpr std::array kTargets = {FaultTarget::gradients, FaultTarget::activations, FaultTarget::weights, FaultTarget::moments};

ProbeScript probe_script(const WatchedVariant& variant, const RunContext& context) {
  WatchedScript watched = watched_script(variant, context, {});
  watched.config.evaluate_batches = 0;
  return {.config = watched.config, .data = watched.data};
}

// ---- turned bits

constexpr std::int64_t kFirstUpset = 22;
constexpr std::int64_t kProbeSteps = 36;
constexpr std::size_t kLastSteps = 4;

double last_loss(const ProbeRun& run) {
  double sum = 0;
  for (std::size_t i = run.steps.size() - kLastSteps; i < run.steps.size(); ++i) sum += run.steps[i].loss;
  return sum / static_cast<double>(kLastSteps);
}

bool is_of_time(AnomalyMonitor monitor) {
  return monitor == AnomalyMonitor::slow_collective || monitor == AnomalyMonitor::slow_rank ||
         monitor == AnomalyMonitor::throughput_drop;
}

// The first incident of what is computed; what else the machine does may look like a slow rank.
const AnomalyIncident* first_incident(const ProbeRun& run) {
  const auto found = std::ranges::find_if(
      run.incidents, [](const AnomalyIncident& incident) { return !is_of_time(incident.findings.at(0).monitor); });
  return found == run.incidents.end() ? nullptr : &*found;
}

// What became of the turned bits of one kind.
struct Tally {
  int trials = 0, found = 0;
  std::map<std::string, int> first;  // by monitor
  std::int64_t longest_delay = 0;
  int named = 0;
  int missed_and_felt = 0;  // not found, and the loss is another than without it
  double worst_missed = 0;  // by how much, relatively
  std::string worst;
};

void count(const Upset& upset, const ProbeRun& run, double clean_loss, Tally& tally) {
  ++tally.trials;
  if (const AnomalyIncident* const incident = first_incident(run)) {
    const AnomalyFinding& finding = incident->findings.at(0);
    ++tally.found;
    ++tally.first[std::string(name(finding.monitor))];
    tally.longest_delay = std::max(tally.longest_delay, incident->step - upset.step);
    tally.named += finding.rank == upset.rank ? 1 : 0;
    return;
  }
  const double change = std::abs(last_loss(run) / clean_loss - 1);
  tally.missed_and_felt += change == 0 ? 0 : 1;
  if (change <= tally.worst_missed) return;
  tally.worst_missed = change;
  tally.worst = fmt::format("bit {}", run.bit);
}

std::string by_monitor(const Tally& tally) {
  std::string text;
  for (const auto& [monitor, times] : tally.first) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", monitor, times);
  return text.empty() ? "none" : text;
}

void add_tally(FaultTarget target, const Tally& tally, std::int64_t sample_every_steps, std::vector<Property>& properties) {
  const auto of = [target](const std::string& what) { return fmt::format("{} ({})", what, name(target)); };
  const bool in_state = target == FaultTarget::weights || target == FaultTarget::moments;
  properties.push_back(
      {of("detection_rate"), static_cast<double>(tally.found) / tally.trials, Relation::at_least, in_state ? 0.5 : 0.0,
       fmt::format("{} of {} turned bits; first: {}; rank named {} times; {}", tally.found, tally.trials, by_monitor(tally),
                   tally.named,
                   in_state ? "copies differ until they are compared, but for low bits that rounding has swallowed by then"
                            : "summed over the ranks it is the same everywhere: only what is large can be seen"),
       -1, ""});
  properties.push_back({of("longest_delay_steps"), static_cast<double>(tally.longest_delay), Relation::at_most,
                        static_cast<double>(sample_every_steps), "the next step, or the next look at the state", -1, ""});
  properties.push_back({of("worst_change_of_the_loss_not_found"), tally.worst_missed, Relation::at_most, 0.36,
                        fmt::format("12 x 0.03: what a spike is at least; {}", tally.worst), -1, ""});
  if (!in_state) return;
  properties.push_back(exactly(of("not_found_and_felt"), tally.missed_and_felt, 0,
                               "what is not found has vanished: the losses are those of the undisturbed run, to the last bit"));
}

Case bits_case(int trials, bool quick) {
  const WatchedVariant variant{.degrees = {.data = 3}, .steps = kProbeSteps, .action = AnomalyAction::report, .retry = false};
  Case result = anomaly_case(fmt::format("bits/trials{}", trials),
                             "any bit of any number of any rank: what is found, and what the rest does to the loss", variant);
  result.quick = quick;
  result.execute = [=](const RunContext& context) {
    ProbeScript script = probe_script(variant, context);
    const double clean_loss = last_loss(run_probe(script, context));
    CaseEvidence evidence;
    for (const FaultTarget target : kTargets) {
      Tally tally;
      for (int trial = 0; trial < trials; ++trial) {
        const Upset upset{target, trial % 3, kFirstUpset + trial % 5, context.seed * 1000 + static_cast<std::uint64_t>(trial)};
        script.upset = upset;
        count(upset, run_probe(script, context), clean_loss, tally);
      }
      add_tally(target, tally, script.config.anomaly.sample_every_steps, evidence.properties);
    }
    return evidence;
  };
  return result;
}

// ---- every scripted fault

constexpr std::int64_t kStruck = 25;  // from 0

struct Struck {
  std::string label;
  Fault fault;
  std::vector<AnomalyMonitor> first;  // any of these may come first
  std::int64_t longest_delay = 0;
  /// What the policy takes it for; empty: other cases show what becomes of it.
  std::optional<reference::ScriptedAnomaly::Cause> cause = {};
};

Fault value_fault(FaultKind kind, FaultTarget target) {
  Fault fault;
  fault.kind = kind;
  fault.step = kStruck + 1;
  fault.rank = 1;
  fault.target = target;
  return fault;
}

std::vector<Struck> scripted_faults(std::int64_t sample_every_steps) {
  using enum AnomalyMonitor;
  using enum FaultTarget;
  using enum reference::ScriptedAnomaly::Cause;
  const Fault spike = value_fault(FaultKind::spike, gradients);
  // One number of one token: the next norm makes little of it. Seen where it is looked at, in the next sampled step.
  Fault sampled = value_fault(FaultKind::flip, activations);
  while (sampled.step % sample_every_steps != 0) ++sampled.step;
  Fault garbage;
  garbage.kind = FaultKind::poison;
  garbage.step = 0;
  garbage.batch = kStruck;
  return {{"nan gradients", value_fault(FaultKind::nan, gradients), {gradient_not_finite}, 0},
          {"nan activations", value_fault(FaultKind::nan, activations), {gradient_not_finite}, 0},
          {"nan weights", value_fault(FaultKind::nan, weights), {gradient_not_finite}, 0},
          {"nan moments", value_fault(FaultKind::nan, moments), {gradient_not_finite, weight_not_finite}, 1, state},
          {"flip gradients", value_fault(FaultKind::flip, gradients), {gradient_not_finite, norm_spike}, 0, machine},
          {"flip activations", sampled, {activation_range}, 0, machine},
          {"flip weights", value_fault(FaultKind::flip, weights), {replica_divergence}, sample_every_steps},
          {"flip moments", value_fault(FaultKind::flip, moments), {replica_divergence}, sample_every_steps},
          {"spike", spike, {loss_spike, activation_range}, 2},
          {"poison", garbage, {loss_spike}, 0}};
}

double delay_of(const AnomalyIncident& incident, const Fault& fault) {
  return static_cast<double>(incident.step - (fault.kind == FaultKind::poison ? fault.batch : fault.step - 1));
}

void add_first_monitor(const Struck& struck, const TrainReport& report, std::vector<Property>& properties) {
  const bool any = !report.incidents.empty();
  const AnomalyFinding first = any ? report.incidents.front().findings.at(0) : AnomalyFinding{};
  const bool expected = any && std::ranges::find(struck.first, first.monitor) != struck.first.end();
  properties.push_back(exactly(fmt::format("first_monitor_is_one_that_should ({})", struck.label), expected ? 1 : 0, 1,
                               any ? fmt::format("{}: {}", name(first.monitor), first.describe()) : "nothing is found"));
  properties.push_back({fmt::format("delay_steps ({})", struck.label),
                        any ? delay_of(report.incidents.front(), struck.fault) : std::nan(""), Relation::at_most,
                        static_cast<double>(struck.longest_delay), "0: before the update that it would spoil", -1, ""});
}

// The same fault under the whole policy.
void add_recovery(const Struck& struck, const WatchedVariant& variant, const RunContext& context, Teller& teller,
                  std::vector<Property>& properties) {
  const ScratchFolder scratch("anomaly-table");
  WatchedScript script = watched_script(variant, context, scratch.path());
  script.faults = {struck.fault};
  const TrainReport report = run_watched(script, context);
  if (report.incidents.empty()) return;  // said already
  const reference::PolicyOutcome story = story_of(script, {{*struck.cause, report.incidents.front().step}});
  const CheckpointRun& truth = teller.tell(script, story);
  add_course(struck.label, report, story, properties);
  properties.push_back(same_steps(struck.label, report, truth));
  properties.push_back(equal_to_told(struck.label, script, truth));
}

Case table_case() {
  const WatchedVariant variant{.degrees = {.data = 3}, .steps = 32};
  Case result =
      anomaly_case("table", "each scripted fault, the monitor that sees it first, and what the policy makes of it", variant);
  result.execute = [variant](const RunContext& context) {
    CaseEvidence evidence;
    Teller teller(context);
    WatchedScript script = watched_script(variant, context, {});
    script.config.anomaly.action = AnomalyAction::report;
    script.config.anomaly.retry = false;
    for (const Struck& struck : scripted_faults(script.config.anomaly.sample_every_steps)) {
      script.faults = {struck.fault};
      add_first_monitor(struck, run_watched(script, context), evidence.properties);
      if (struck.cause) add_recovery(struck, variant, context, teller, evidence.properties);
    }
    return evidence;
  };
  return result;
}

// ---- nothing

// [numbers, times]
std::array<double, 2> alarms(const ProbeRun& run) {
  std::array<double, 2> count{};
  for (const AnomalyIncident& incident : run.incidents) {
    for (const AnomalyFinding& finding : incident.findings) count[is_of_time(finding.monitor) ? 1 : 0] += 1;
  }
  return count;
}

Case clean_case(int seeds, std::int64_t steps, bool quick) {
  const WatchedVariant variant{.degrees = {.data = 2}, .steps = steps, .action = AnomalyAction::report, .retry = false};
  Case result =
      anomaly_case(fmt::format("clean/steps{}", seeds * steps), "runs in which nothing is wrong: nothing is found", variant);
  result.quick = quick;
  result.timed = true;
  result.execute = [=](const RunContext& context) {
    double of_numbers = 0;
    double of_times = 0;
    double seen = 0;
    std::string first;
    for (int i = 0; i < seeds; ++i) {
      RunContext seeded = context;
      seeded.seed += static_cast<std::uint64_t>(i);
      ProbeScript script = probe_script(variant, seeded);
      script.config.optimizer.learning_rate = 5e-3;
      script.config.anomaly = {};
      script.config.anomaly.retry = false;
      const ProbeRun run = run_probe(script, seeded);
      const auto [numbers, times] = alarms(run);
      of_numbers += numbers;
      of_times += times;
      seen += static_cast<double>(run.steps.size());
      if (first.empty() && !run.incidents.empty()) first = run.incidents.front().describe();
    }
    CaseEvidence evidence;
    evidence.properties = {exactly("steps", seen, static_cast<double>(seeds * steps), fmt::format("{} seeds", seeds)),
                           exactly("false_alarms", of_numbers, 0, first.empty() ? "none of anything that is computed" : first),
                           {"false_alarms_of_times", of_times, Relation::at_most, 1e-3 * seen,
                            "what else the machine does may look like a slow rank; one step in a thousand", -1, ""}};
    return evidence;
  };
  return result;
}

// ---- how far it comes

// Steps from the one in which it arose until no weight of any rank is a number.
double steps_until_everywhere(const ProbeRun& run, std::int64_t arose) {
  for (std::size_t s = static_cast<std::size_t>(arose); s < run.not_finite_share.size(); ++s) {
    if (run.not_finite_share[s] >= 1) return static_cast<double>(s) - static_cast<double>(arose) + 1;
  }
  return std::nan("");
}

struct Spread {
  std::string label;
  WatchedVariant variant;
  bool clips = true;
  double most_steps = 1;
  std::string why;
};

Case spread_case(const std::vector<Spread>& spreads) {
  Case result =
      anomaly_case("spread", "one NaN on one rank: steps until it is everywhere when nobody looks, steps lost when one does",
                   spreads.front().variant);
  result.execute = [spreads](const RunContext& context) {
    CaseEvidence evidence;
    for (const Spread& spread : spreads) {
      ProbeScript script = probe_script(spread.variant, context);
      script.counts_not_finite = true;
      if (!spread.clips) script.config.optimizer.max_grad_norm = 0;
      script.upset = Upset{FaultTarget::gradients, spread.variant.degrees.world_size() - 1, 10, context.seed, true};
      const ProbeRun alone = run_probe(script, context);
      evidence.properties.push_back({fmt::format("steps_until_everywhere ({})", spread.label), steps_until_everywhere(alone, 10),
                                     Relation::at_most, spread.most_steps, spread.why, -1, ""});
      script.config.anomaly.action = AnomalyAction::skip;
      const ProbeRun watched = run_probe(script, context);
      const double worst = *std::ranges::max_element(watched.not_finite_share);
      evidence.properties.push_back(exactly(fmt::format("share_not_finite_when_watched ({})", spread.label), worst, 0,
                                            "the update is left out before it touches anything"));
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_anomaly_detection_cases(CaseList& cases) {
  cases.push_back(table_case());
  cases.push_back(bits_case(4, true));
  cases.push_back(bits_case(100, false));
  cases.push_back(clean_case(2, 300, true));
  cases.push_back(clean_case(5, 2000, false));
  const auto unwatched = [](ParallelDegrees degrees) {
    return WatchedVariant{.degrees = degrees, .steps = 16, .action = AnomalyAction::off};
  };
  const std::string by_norm = "through the norm that all are clipped by, in the step itself";
  cases.push_back(spread_case(
      {{"data 3", unwatched({.data = 3}), true, 1, by_norm},
       {"tensor 2", unwatched({.tensor = 2}), true, 2,
        "a weight that both ranks hold counts in the norm of one of them; with the next step it is in the sums of all"},
       {"pipeline 2", unwatched({.pipeline = 2}), true, 1, by_norm},
       {"data 3 without clipping", unwatched({.data = 3}), false, 2, "one weight, and with the next step's activations all"}}));
}

}  // namespace tandem
