// SPDX-License-Identifier: Apache-2.0
// Predicted against measured: layers that take a stated time, asleep, and links that take a stated time, so that two cores show
// what a cluster would; the step programs replayed by the same two tell how long a step takes.
#include <algorithm>

#include <fmt/format.h>

#include "harness/measurement.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/scaling/replay.h"
#include "suites/benefits.h"
#include "suites/collectives_cases.h"
#include "suites/parallel_cases.h"
#include "suites/scaling_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

constexpr double kTolerance = 0.1;
// Whatever else this machine does only adds time: as soon as the prediction is met, there is nothing more to wait for.
constexpr int kRounds = 4;

// Of a layer forward; its backward pass takes twice as long. Long beside the real work of the small model.
constexpr double kPassSeconds = 0.006;

double pass_seconds(const Operation& op) { return ends_pass(op) ? kPassSeconds : 0.0; }

struct Steps {
  double measured_seconds = 0, predicted_seconds = 0, compute_seconds = 0;
};

double predicted(const PairInputs& inputs, const WorldSettings& world, const PitfallSet& pitfalls, double& compute_seconds) {
  const OperationCost cost = cost_measured(world, inputs.plan, pass_seconds);
  const ReplayTiming timing = replay(inputs.plan, inputs.model, inputs.data->sequence(), cost, {}, pitfalls);
  compute_seconds = *std::max_element(timing.busy_seconds.begin(), timing.busy_seconds.end());
  return timing.step_seconds;
}

// Of two steps the shortest: late wake-ups and other programs only add.
Steps steps_of(const ParallelVariant& variant, const LinkProfile& link, const RunContext& context, CaseEvidence& evidence) {
  RunContext shaped = context;
  shaped.world.link = link;
  PairInputs inputs = inputs_of(variant, context);
  inputs.injected_seconds = pass_seconds;
  inputs.steps = 3;
  Steps steps;
  steps.predicted_seconds = predicted(inputs, shaped.world, context.pitfalls, steps.compute_seconds);
  for (int round = 0; round < kRounds; ++round) {
    EngineRun run = engine_run(inputs, shaped);
    const std::vector<double>& seconds = run.measured.step_seconds;
    const double least = *std::min_element(seconds.begin(), seconds.end());
    if (round == 0 || least < steps.measured_seconds) {
      steps.measured_seconds = least;
      evidence.candidate = std::move(run.evidence);
      evidence.measured = std::move(run.measured);
    }
    if (steps.measured_seconds <= (1 + kTolerance / 2) * steps.predicted_seconds) break;
  }
  return steps;
}

struct MeasuredCase {
  std::string name;
  ParallelVariant variant;
  LinkProfile link;
};

Case measured_case(const MeasuredCase& entry) {
  Case result;
  const PairInputs shown = inputs_of(entry.variant, {});
  result.suite = "scaling";
  result.name = "scaling/measured/" + entry.name;
  result.summary = "a step over a shaped link takes the time that its replay predicts";
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::convergence;
  result.timed = true;
  result.unavailable = cannot_time_links;
  result.execute = [entry](const RunContext& context) {
    CaseEvidence evidence;
    const Steps steps = steps_of(entry.variant, entry.link, context, evidence);
    evidence.properties = {
        relative_error("step_error", steps.measured_seconds, steps.predicted_seconds, kTolerance,
                       "seconds measured, and replayed from the programs, the passes' times and the link's; 10 %"),
        {"without_communication_error", steps.measured_seconds / steps.compute_seconds - 1, Relation::at_least, kTolerance,
         fmt::format("{:.1f} ms of computing alone would be no prediction: the link takes its part of {:.1f}",
                     1e3 * steps.compute_seconds, 1e3 * steps.measured_seconds),
         -1, ""}};
    return evidence;
  };
  return result;
}

// An all-reduce of one layer's gradients takes so many times a layer's backward pass.
LinkProfile link_for_gradients(const ParallelVariant& variant, double backward_passes) {
  constexpr double kLatency = 2e-4;
  const double ranks = variant.degrees.data;
  const double wire_bytes = 2 * (ranks - 1) / ranks * static_cast<double>(layer_bytes(model_of(variant)));
  return stated_link(kLatency, wire_bytes / (backward_passes * 2 * kPassSeconds - 2 * kLatency));
}

// One message of a micro-batch's activations takes so many layers' forward passes.
LinkProfile link_for_activations(const ParallelVariant& variant, std::int64_t rows, double forward_passes) {
  constexpr double kLatency = 2e-4;
  const auto bytes = static_cast<double>(rows * variant.row_tokens * variant.hidden * 4);
  return stated_link(kLatency, bytes / (forward_passes * kPassSeconds - kLatency));
}

// All bandwidths that a rank's link carries are below what it can, and a ring comes near it.
std::vector<Property> bus_bandwidths(const RunContext& context) {
  constexpr int kRanks = 3;
  constexpr double kBandwidth = 4e6, kLatency = 1e-4;
  constexpr std::int64_t kBytes = 96000;
  const std::vector<std::pair<CollectiveKind, Collective>> kinds = {{CollectiveKind::all_reduce, Collective::all_reduce},
                                                                    {CollectiveKind::reduce_scatter, Collective::reduce_scatter},
                                                                    {CollectiveKind::all_gather, Collective::all_gather},
                                                                    {CollectiveKind::all_to_all, Collective::all_to_all}};
  std::vector<TimedCollective> timed;
  timed.reserve(kinds.size());
  for (const auto& [kind, collective] : kinds) timed.push_back({kind, CollectiveAlgorithm::ring, kBytes});
  const std::vector<double> seconds = time_collectives(stated_link(kLatency, kBandwidth), kRanks, 4, timed);
  std::vector<Property> properties;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const double share = bus_bandwidth(kinds[i].second, kBytes, seconds[i], kRanks, context.pitfalls) / kBandwidth;
    const std::string kind(name(kinds[i].second));
    properties.push_back({"bus_bandwidth_of_link, " + kind, share, Relation::at_most, 1.0,
                          fmt::format("{:.2f} ms for {} bytes over {:.0f} MB/s: a link carries no more than it can",
                                      1e3 * seconds[i], kBytes, kBandwidth / 1e6),
                          -1, ""});
    properties.push_back({"bus_bandwidth_of_link_low, " + kind, share, Relation::at_least, 0.8,
                          "parts of 32 kB take 8 ms each, a message's latency 0.1 ms, late wake-ups some more", -1, ""});
  }
  return properties;
}

}  // namespace

void add_scaling_measured_cases(CaseList& cases) {
  ParallelVariant data{.degrees = {.data = 3}, .rows = 3, .layers = 4};
  data.bucket_bytes = layer_bytes(model_of(data));
  cases.push_back(measured_case({"data/ranks3", data, link_for_gradients(data, 0.5)}));
  ParallelVariant overlapped = data;
  overlapped.overlap.gradients = true;
  cases.push_back(measured_case({"data-overlapped/ranks3", overlapped, link_for_gradients(data, 1.2)}));
  ParallelVariant zero = overlapped;
  zero.zero_stage = 3;
  zero.bucket_bytes = 0;
  cases.push_back(measured_case({"zero3/ranks3", zero, link_for_gradients(data, 1.2)}));
  // Few and long sums: each wakes its ranks up twice.
  const ParallelVariant tensor{.degrees = {.tensor = 2}, .rows = 2, .layers = 2};
  cases.push_back(measured_case({"tensor/ranks2", tensor, link_for_activations(tensor, 2, 1.2)}));
  const ParallelVariant pipeline{.degrees = {.pipeline = 4}, .micro_batches = 4, .rows = 4, .layers = 4};
  cases.push_back(measured_case({"1f1b/ranks4", pipeline, link_for_activations(pipeline, 1, 0.5)}));
  const ParallelVariant interleaved{.degrees = {.pipeline = 2},
                                    .pipeline = {.schedule = "interleaved", .chunks = 2},
                                    .micro_batches = 4,
                                    .rows = 4,
                                    .layers = 4};
  cases.push_back(measured_case({"interleaved/ranks2", interleaved, link_for_activations(interleaved, 1, 0.7)}));
  const ParallelVariant both{.degrees = {.data = 2, .tensor = 2}, .rows = 2, .layers = 2};
  cases.push_back(measured_case({"data-tensor/ranks4", both, link_for_activations(both, 1, 1.0)}));

  Case bandwidth =
      scaling_case("measured/bus-bandwidth/ranks3", "no collective is measured faster than its link", bus_bandwidths);
  bandwidth.timed = true;
  bandwidth.unavailable = cannot_time_links;
  cases.push_back(std::move(bandwidth));
}

}  // namespace tandem
