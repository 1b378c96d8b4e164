// SPDX-License-Identifier: Apache-2.0
// The engine's own step programs played in time, where the answer is known without them.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "optimized/scaling/replay.h"
#include "reference/pipeline_schedules.h"
#include "reference/scaling.h"
#include "suites/properties.h"
#include "suites/scaling_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

constexpr std::int64_t kSequence = 16;

GptConfig small_model(int layers) {
  GptConfig model;
  model.vocabulary = 64;
  model.sequence = kSequence;
  model.layers = layers;
  model.hidden = 32;
  model.heads = 4;
  return model;
}

TrainingPlan plan_of(ParallelDegrees degrees, std::int64_t rows, int micro_batches) {
  TrainingPlan plan;
  plan.parallel = degrees;
  plan.numerics = numerics_from_precision("fp32");
  plan.batch = {rows, micro_batches};
  return plan;
}

// Forward, input and weight part of a layer take a second each, everything else nothing.
double unit_layers(const Operation& op, int /*stage*/) { return ends_pass(op) ? 1.0 : 0.0; }

double idle_share(const ReplayTiming& timing) {
  const double busy = std::accumulate(timing.busy_seconds.begin(), timing.busy_seconds.end(), 0.0);
  return 1 - busy / (static_cast<double>(timing.busy_seconds.size()) * timing.step_seconds);
}

// zb-v fills all but the way of the first micro-batch to the last rank (optimized/pipeline_parallel/schedule.h).
double closed_form(const PipelineConfig& pipeline, int ranks, int micro_batches) {
  if (pipeline.schedule == "zb-v") return (ranks - 1) / (6.0 * micro_batches + ranks - 1);
  return reference::pipeline_bubble_share(pipeline.schedule, {ranks, pipeline.chunks, micro_batches});
}

std::vector<Property> bubbles(const RunContext& context) {
  const std::vector<PipelineConfig> schedules = {{.schedule = "gpipe"},
                                                 {.schedule = "1f1b"},
                                                 {.schedule = "interleaved", .chunks = 2},
                                                 {.schedule = "interleaved", .chunks = 4},
                                                 {.schedule = "zb-h1"},
                                                 {.schedule = "zb-v", .chunks = 2}};
  std::vector<Property> properties;
  for (const PipelineConfig& schedule : schedules) {
    for (const int ranks : {2, 4, 8}) {
      const int micro_batches = 2 * ranks;
      TrainingPlan plan = plan_of({.pipeline = ranks}, micro_batches, micro_batches);
      plan.pipeline = schedule;
      const GptConfig model = small_model(ranks * schedule.chunks);
      const double idle = idle_share(replay(plan, model, kSequence, unit_layers, {}, context.pitfalls));
      properties.push_back(relative_error(fmt::format("{} x {}, {} ranks", schedule.schedule, schedule.chunks, ranks), idle,
                                          closed_form(schedule, ranks, micro_batches), kExact,
                                          fmt::format("closed form for {} micro-batches, messages free", micro_batches)));
    }
  }
  return properties;
}

constexpr reference::Link kLink = {2e-6, 1e-9};
constexpr double kSecondsPerFlop = 12.5e-12;

// Strong scaling of plain data parallelism: work goes with the rows, the gradients stay.
std::vector<Property> share_of_communication(const RunContext& /*context*/) {
  const GptConfig model = small_model(2);
  constexpr std::int64_t kRows = 64;
  const auto replayed = [&](int ranks) {
    const TrainingPlan plan = plan_of({.data = ranks}, kRows, 1);
    double gradient_bytes = 0;
    const auto cost = [&](const Operation& op, int) {
      if (op.kind != OpKind::communicate) return op.flops * kSecondsPerFlop;
      if (op.purpose != Purpose::gradient) return 0.0;
      gradient_bytes += static_cast<double>(op.bytes);
      return reference::ring_all_reduce_seconds(ranks, static_cast<double>(op.bytes), kLink);
    };
    const ReplayTiming timing = replay(plan, model, kSequence, cost);
    return std::pair(timing, gradient_bytes);
  };
  const double alone = replayed(1).first.step_seconds;
  std::vector<Property> properties;
  double least = 1, most = 0;
  for (const int ranks : {2, 4, 8, 16, 32, 64}) {
    const auto [timing, bytes] = replayed(ranks);
    const double share = timing.exposed_seconds[0] / timing.step_seconds;
    least = std::min(least, share);
    most = std::max(most, share);
    properties.push_back(relative_error(fmt::format("communication_share of {} ranks", ranks), share,
                                        reference::communication_share(alone, ranks, bytes, kLink), kExact,
                                        "c(n) / (c(n) + W / n), c(n) a ring all-reduce of the gradients"));
  }
  properties.push_back({"share_grows", most / least, Relation::at_least, 3.0,
                        fmt::format("from {:.2f} on 2 ranks to {:.2f} on 64", least, most), -1, ""});
  return properties;
}

// A link that two axes share is never idle while one of them wants it, and never carries more than it can.
std::vector<Property> contention(const RunContext& context) {
  TrainingPlan plan = plan_of({.data = 4, .tensor = 2}, 16, 1);
  plan.buckets.bucket_bytes = 30000;
  plan.overlap.gradients = true;
  const GptConfig model = small_model(4);
  double wanted = 0;
  const auto cost = [&](const Operation& op, int) {
    if (op.kind != OpKind::communicate) return op.flops * 1e-9;
    const double seconds = static_cast<double>(op.bytes) * 1e-7;
    wanted += seconds;
    return seconds;
  };
  const auto all = [](GroupAxis, GroupAxis) { return true; };
  const double apart = replay(plan, model, kSequence, cost).step_seconds;
  wanted = 0;
  const ReplayTiming shared = replay(plan, model, kSequence, cost, all, context.pitfalls);
  return {{"link_use", wanted / shared.transfer_seconds[0], Relation::at_most, 1 + kExact,
           "seconds that all operations need alone over the seconds in which the link is used: no more than one link's worth", -1,
           ""},
          {"link_use_low", wanted / shared.transfer_seconds[0], Relation::at_least, 1 - kExact, "processor sharing loses nothing",
           -1, ""},
          {"slower_than_apart", shared.step_seconds / apart, Relation::at_least, 1.01,
           "gradients on their way slow tensor ranks down, whose sums are waited for", -1, ""}};
}

std::vector<Property> accounts(const RunContext& context) {
  std::vector<Property> properties;
  for (const bool overlap : {false, true}) {
    TrainingPlan plan = plan_of({.data = 2, .tensor = 2, .pipeline = overlap ? 2 : 1}, 16, 4);
    plan.buckets.bucket_bytes = 20000;
    plan.overlap.gradients = overlap;
    const auto cost = [](const Operation& op, int) {
      return op.kind == OpKind::communicate ? 1e-5 + 1e-8 * static_cast<double>(op.bytes) : 1e-9 * op.flops;
    };
    const ReplayTiming timing = replay(plan, small_model(4), kSequence, cost, {}, context.pitfalls);
    const std::string which = overlap ? "overlapped" : "plain";
    double last_end = 0;
    double most_hidden = 0;
    for (std::size_t stage = 0; stage < timing.busy_seconds.size(); ++stage) {
      const double busy = timing.busy_seconds[stage], exposed = timing.exposed_seconds[stage];
      const double hidden = timing.hidden_seconds[stage], transfers = timing.transfer_seconds[stage];
      last_end = std::max(last_end, busy + exposed);
      most_hidden = std::max(most_hidden, hidden);
      const std::string of = fmt::format("{}, stage {}", which, stage);
      properties.push_back({"hidden_over_busy of " + of, hidden / busy, Relation::at_most, 1 + kExact,
                            "what is hidden is hidden behind computing", -1, ""});
      properties.push_back({"hidden_and_exposed_over_transfers of " + of, (hidden + exposed) / transfers, Relation::at_least,
                            1 - kExact, "what is on its way is hidden or waited for", -1, ""});
    }
    properties.push_back(relative_error("busy_and_exposed of " + which, last_end, timing.step_seconds, kExact,
                                        "the rank that ends last computes or waits all the time"));
    properties.push_back(overlap ? Property{"hidden_seconds of " + which, most_hidden, Relation::at_least, 1e-6,
                                            "buckets are on their way during the backward pass", -1, ""}
                                 : exactly("hidden_seconds of " + which, most_hidden, 0,
                                           "nothing is in the background, and no message comes early"));
  }
  return properties;
}

// GPT of 175 billion parameters on 16,384 ranks.
std::vector<Property> sixteen_thousand(const RunContext& /*context*/) {
  GptConfig model;
  model.vocabulary = 51200;
  model.sequence = 2048;
  model.layers = 96;
  model.hidden = 12288;
  model.heads = 96;
  TrainingPlan plan = plan_of({.data = 128, .tensor = 8, .pipeline = 16}, 2048, 16);
  plan.numerics = numerics_from_precision("bf16");
  plan.precision = "bf16";
  plan.sequence_parallel = true;
  plan.pipeline = {.schedule = "interleaved", .chunks = 6};
  plan.recompute.mode = "full";
  plan.zero_stage = 1;
  plan.buckets.bucket_bytes = 40'000'000;
  plan.overlap.gradients = true;
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<StepProgram> programs = representative_programs(plan, model, model.sequence);
  const auto cost = [](const Operation& op, int) {
    return op.kind == OpKind::communicate ? 1e-5 + 1e-11 * static_cast<double>(op.bytes) : 1e-14 * op.flops + 1e-6;
  };
  const ReplayTiming timing = replay(programs, plan, cost);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  // A pass of a layer is some 14 operations with its communication, forward, again and backward; beside them messages and memory.
  const double passes = 3.0 * static_cast<double>(model.layers) * plan.batch.micro_batches;
  return {exactly("programs", static_cast<double>(programs.size()), plan.parallel.pipeline,
                  fmt::format("one for each pipeline rank of {} ranks", plan.parallel.world_size())),
          {"operations_per_pass", static_cast<double>(timing.operations) / passes, Relation::at_most, 40,
           fmt::format("{} operations: they grow with layers x micro-batches of one rank of a stage, not with the ranks",
                       timing.operations),
           -1, ""},
          {"seconds", taken.count(), Relation::at_most, 2.0,
           fmt::format("to lower and replay a step of {:.2f} s on 16,384 GPUs, on one core", timing.step_seconds), -1, ""}};
}

}  // namespace

void add_scaling_replay_cases(CaseList& cases) {
  cases.push_back(scaling_case("bubble/replay", "idle share of every schedule, played in time, is its closed form", bubbles));
  cases.push_back(scaling_case("communication-share", "strong scaling of data parallelism: share of the step that communicates",
                               share_of_communication));
  cases.push_back(scaling_case("contention", "two axes on one link: all of it is used, and no more", contention));
  cases.push_back(scaling_case("accounts", "computing, hidden and exposed communication add up", accounts));
  Case large = scaling_case("16384", "a step of GPT-175B on 16,384 ranks is replayed in two seconds", sixteen_thousand);
  large.timed = true;
  cases.push_back(std::move(large));
}

}  // namespace tandem
