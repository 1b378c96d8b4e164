// SPDX-License-Identifier: Apache-2.0
// Overlap in time: layers that take a stated time, asleep, and links that take a stated time, so that two cores show what a
// cluster would. The step program replayed in time (core/step_program.h) predicts every number. docs/techniques/overlap.md
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "harness/statistics.h"
#include "optimized/engine/lower.h"
#include "optimized/scaling/replay.h"
#include "suites/benefits.h"
#include "suites/overlap_cases.h"
#include "suites/parallel_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

// Long beside the real work of a small model, so that ranks asleep need no cores of their own.
constexpr double kPassSeconds = 0.006;  // a layer forward; its backward pass takes twice as long

double pass_seconds(const Operation& op) { return ends_pass(op) ? kPassSeconds : 0.0; }

// Reducing one layer takes `layers` times as long as a layer's backward pass; `latency_seconds` of one message.
LinkProfile link_of(const ParallelVariant& variant, double layers, double latency_seconds) {
  LinkProfile link;
  link.name = "stated";
  link.description = "an all_reduce of one layer's gradients in a stated part of its backward pass";
  const double ranks = variant.degrees.data;
  const double wire_bytes = 2 * (ranks - 1) / ranks * static_cast<double>(layer_bytes(model_of(variant)));
  const double seconds = layers * 2 * kPassSeconds - 2 * latency_seconds;
  link.between_nodes = link.in_node = {latency_seconds, wire_bytes / seconds, 0};
  return link;
}

struct Prediction {
  double step_seconds = 0;
  double exposed_seconds = 0;  ///< of the rank that waits longest
};

Prediction predict(const PairInputs& inputs, const LinkProfile& link) {
  const ProgramExpectation expected = expectation(inputs.plan, inputs.model, inputs.data->sequence());
  WorldSettings world;
  world.link = link;
  const OperationCost cost = cost_measured(world, inputs.plan, pass_seconds);
  const auto seconds = [&](const Operation& op) { return cost(op, 0); };
  const ProgramTiming timing = time_programs(programs_of(inputs), expected, seconds);
  return {timing.makespan_seconds, *std::max_element(timing.exposed_seconds.begin(), timing.exposed_seconds.end())};
}

struct Measurement {
  PairInputs inputs;
  EngineRun run;
  Prediction predicted;
  double step_seconds = 0, exposed_seconds = 0;
};

Measurement measure(const ParallelVariant& variant, const LinkProfile& link, const RunContext& context,
                    const std::string& side_suffix = "") {
  RunContext shaped = context;
  shaped.world.link = link;
  Measurement result{.inputs = inputs_of(variant, context), .run = {}, .predicted = {}};
  result.inputs.injected_seconds = pass_seconds;
  result.run = engine_run(result.inputs, shaped, side_suffix);
  result.predicted = predict(result.inputs, link);
  result.step_seconds = median(result.run.measured.step_seconds);
  result.exposed_seconds = exposed_seconds(result.run.measured);
  return result;
}

// The real work of the small model, and late wake-ups, come on top of the stated times: a part of a layer's pass.
constexpr double kSlackSeconds = kOverlapSlackSeconds;
static_assert(kSlackSeconds == 0.5 * kPassSeconds);

std::vector<Property> hidden(const Measurement& plain, const Measurement& overlapped, double least_hidden) {
  const double share = 1 - overlapped.exposed_seconds / plain.exposed_seconds;
  const double predicted_share = 1 - overlapped.predicted.exposed_seconds / plain.predicted.exposed_seconds;
  return {
      {"hidden_share", share, Relation::at_least, least_hidden,
       fmt::format("of {:.1f} ms that are exposed without overlap {:.1f} are left; the step programs predict {:.2f}",
                   1e3 * plain.exposed_seconds, 1e3 * overlapped.exposed_seconds, predicted_share),
       -1, ""},
      {"exposed_seconds", overlapped.exposed_seconds, Relation::at_most,
       1.1 * overlapped.predicted.exposed_seconds + kSlackSeconds,
       fmt::format(
           "predicted {:.1f} ms: what is reduced after the last computation, and 10 % of it; half a layer's pass for real "
           "work and late wake-ups",
           1e3 * overlapped.predicted.exposed_seconds),
       -1, ""},
      {"step_seconds_saved", plain.step_seconds - overlapped.step_seconds, Relation::at_least,
       0.9 * (plain.predicted.step_seconds - overlapped.predicted.step_seconds) - kSlackSeconds,
       fmt::format("{:.1f} ms became {:.1f}; predicted {:.1f} and {:.1f}", 1e3 * plain.step_seconds,
                   1e3 * overlapped.step_seconds, 1e3 * plain.predicted.step_seconds, 1e3 * overlapped.predicted.step_seconds),
       -1, ""}};
}

Case timed_case(const std::string& name, const std::string& summary, const ParallelVariant& variant) {
  Case result;
  const PairInputs shown = inputs_of(variant, {});
  result.suite = "overlap";
  result.name = "overlap/" + name;
  result.summary = summary;
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::bitwise;
  result.timed = true;
  result.unavailable = cannot_time_links;
  return result;
}

struct HiddenCase {
  std::string name;
  ParallelVariant variant;
  double comm_per_backward = 0.6;  ///< time to reduce a layer over that of its backward pass
  double least_hidden = 0.5;
};

Case hidden_case(const HiddenCase& entry) {
  ParallelVariant variant = entry.variant;
  variant.overlap.gradients = true;
  Case result =
      timed_case(entry.name, "layers and links that take stated times: the share of communication that is hidden", variant);
  result.execute = [entry, variant](const RunContext& context) {
    const LinkProfile link = link_of(variant, entry.comm_per_backward, 2e-4);
    ParallelVariant twin = variant;
    twin.overlap = {.gradients = false, .prefetch = false, .tensor_chunks = 1};
    Measurement plain = measure(twin, link, context, " twin");
    Measurement overlapped = measure(variant, link, context);
    CaseEvidence evidence;
    evidence.properties = hidden(plain, overlapped, entry.least_hidden);
    evidence.properties.push_back(proven_program(overlapped.inputs));
    evidence.truth = std::move(plain.run.evidence);
    evidence.candidate = std::move(overlapped.run.evidence);
    evidence.measured = std::move(overlapped.run.measured);
    return evidence;
  };
  return result;
}

// A bucket for every tensor pays a latency for each, one bucket for all hides nothing: between them lies the best.
Case bucket_size_case() {
  ParallelVariant shown{.degrees = {.data = 3}, .rows = 6, .layers = 6};
  shown.overlap.gradients = true;
  shown.bucket_bytes = layer_bytes(model_of(shown));
  Case result = timed_case("bucket-size/ranks3", "step time over bucket size: both ends of the curve", shown);
  result.execute = [shown](const RunContext& context) {
    const LinkProfile link = link_of(shown, 0.8, 1e-3);
    const std::int64_t layer = layer_bytes(model_of(shown));
    CaseEvidence evidence;
    std::vector<double> seconds;
    for (const std::int64_t bytes : {std::int64_t{1}, layer / 4, layer, 2 * layer, std::int64_t{0}}) {
      ParallelVariant variant = shown;
      variant.bucket_bytes = bytes;
      Measurement now = measure(variant, link, context, fmt::format(" buckets of {}", bytes));
      seconds.push_back(now.step_seconds);
      const std::string name = bytes == 0   ? "one bucket"
                               : bytes == 1 ? "a bucket for every tensor"
                                            : fmt::format("{} bytes", bytes);
      evidence.properties.push_back(
          {fmt::format("step_seconds_over_predicted, {}", name), now.step_seconds / now.predicted.step_seconds, Relation::at_most,
           kOverlapFactor + kSlackSeconds / now.predicted.step_seconds,
           fmt::format(
               "{:.1f} ms measured, {:.1f} predicted, {:.1f} of it exposed communication; 10 %, and half a layer's pass for "
               "real work and late wake-ups",
               1e3 * now.step_seconds, 1e3 * now.predicted.step_seconds, 1e3 * now.predicted.exposed_seconds),
           -1, ""});
      // Larger buckets add the same numbers in the same order.
      (evidence.truth ? evidence.candidate : evidence.truth) = std::move(now.run.evidence);
      evidence.measured = std::move(now.run.measured);
    }
    const double best = *std::min_element(seconds.begin() + 1, seconds.end() - 1);
    for (const bool first : {true, false}) {
      evidence.properties.push_back({first ? "every_tensor_over_best" : "one_bucket_over_best",
                                     (first ? seconds.front() : seconds.back()) / best, Relation::at_least, 1.1,
                                     first ? "a latency for each of many messages" : "nothing is hidden", -1, ""});
    }
    return evidence;
  };
  return result;
}

// Whoever measures must not undo what is measured: a step with its timeline takes the time of one without.
Case watched_case(const ParallelVariant& by_layer) {
  ParallelVariant variant = by_layer;
  variant.overlap.gradients = true;
  Case result = timed_case("watched/ranks3", "a step takes the same time with and without its timeline", variant);
  result.execute = [variant](const RunContext& context) {
    RunContext shaped = context;
    shaped.world.link = link_of(variant, 0.6, 2e-4);
    PairInputs inputs = inputs_of(variant, context);
    inputs.injected_seconds = pass_seconds;
    inputs.watched = false;
    EngineRun unwatched = engine_run(inputs, shaped, " unwatched");
    inputs.watched = true;
    EngineRun watched = engine_run(inputs, shaped);
    const double seconds = median(unwatched.measured.step_seconds);
    CaseEvidence evidence;
    evidence.properties = {
        {"watched_step_seconds_more", std::abs(median(watched.measured.step_seconds) - seconds), Relation::at_most, kSlackSeconds,
         fmt::format("of {:.1f} ms without a timeline; half a layer's pass for late wake-ups", 1e3 * seconds), -1, ""}};
    evidence.truth = std::move(unwatched.evidence);
    evidence.candidate = std::move(watched.evidence);
    evidence.measured = std::move(watched.measured);
    return evidence;
  };
  return result;
}

}  // namespace

void add_overlap_time_cases(CaseList& cases) {
  const ParallelVariant three{.degrees = {.data = 3}, .rows = 6, .layers = 6};
  ParallelVariant by_layer = three;
  by_layer.bucket_bytes = layer_bytes(model_of(three));
  cases.push_back(hidden_case({"hidden/ranks3", by_layer, 0.6, 0.6}));
  cases.push_back(hidden_case({"hidden/ranks3/slow-link", by_layer, 1.5, 0.3}));
  ParallelVariant stage1 = three;
  stage1.zero_stage = 1;
  cases.push_back(hidden_case({"hidden/stage1/ranks3", stage1, 0.8, 0.3}));
  ParallelVariant stage2 = three;
  stage2.zero_stage = 2;
  stage2.micro_batches = 2;
  cases.push_back(hidden_case({"hidden/stage2/ranks3", stage2, 0.8, 0.4}));
  ParallelVariant stage3 = three;
  stage3.zero_stage = 3;
  cases.push_back(hidden_case({"hidden/stage3/ranks3", stage3, 0.8, 0.5}));
  cases.push_back(bucket_size_case());
  cases.push_back(watched_case(by_layer));
}

}  // namespace tandem
