// SPDX-License-Identifier: Apache-2.0
// The simulator against the engine's own step programs, its accounts, and what moves it.
#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include "core/pipeline_layout.h"
#include "optimized/scaling/replay.h"
#include "optimized/scaling/simulator.h"
#include "optimized/scaling/simulator_pipeline.h"
#include "reference/pipeline_schedules.h"
#include "reference/scaling.h"
#include "suites/properties.h"
#include "suites/scaling_cases.h"
#include "suites/scaling_shapes.h"

namespace tandem {
namespace {

GptConfig gpt_of(const Workload& workload) { return *gpt_config_of(workload.model); }

// What both price: the simulator knows nothing of sums of a few numbers (losses, norms, statistics of the softmax).
OperationCost shared_cost(const ClusterSpec& cluster, const Workload& workload, bool with_optimizer) {
  const OperationCost cost = cost_on(cluster, workload.plan, gpt_of(workload), workload.tokens_per_row());
  return [cost, with_optimizer](const Operation& op, int stage) {
    const bool few_numbers = op.kind == OpKind::communicate && (op.axis == GroupAxis::world || op.axis == GroupAxis::model ||
                                                                op.purpose == Purpose::other || op.part == Part::head_logits);
    if (few_numbers || (op.kind == OpKind::optimizer && !with_optimizer)) return 0.0;
    return cost(op, stage);
  };
}

double replayed_seconds(const Workload& workload, const ClusterSpec& cluster, bool with_optimizer) {
  return replay(workload.plan, gpt_of(workload), workload.tokens_per_row(), shared_cost(cluster, workload, with_optimizer))
      .step_seconds;
}

struct Shape {
  std::string name;
  Workload workload;
};

Workload overlapping(Workload workload, bool overlaps) {
  workload.software.overlap_gradients = workload.software.overlap_parameters = overlaps;
  workload.software.overlap_pipeline = true;  // a send goes on at once
  workload.plan.overlap.gradients = overlaps;
  return workload;
}

std::vector<Property> exact(const RunContext& context) {
  const ClusterSpec cluster = made_up_cluster();
  const std::vector<Shape> shapes = {{"one rank, 3 micro-batches", gpt_workload("1.7b", {}, 3, 3)},
                                     {"tensor 8", gpt_workload("22b", {.tensor = 8}, 4, 2)},
                                     {"pipeline 4", gpt_workload("7.5b", {.pipeline = 4}, 8, 8)},
                                     {"tensor 4, pipeline 6", gpt_workload("39.1b", {.tensor = 4, .pipeline = 6}, 12, 12)}};
  std::vector<Property> properties;
  for (const Shape& shape : shapes) {
    const Workload workload = overlapping(shape.workload, false);
    const StepEstimate estimate = simulate(workload, cluster, {.pitfalls = context.pitfalls});
    properties.push_back(exactly("hidden_communication of " + shape.name, estimate.hidden_communication_seconds, 0,
                                 "nothing is in the background"));
    properties.push_back(
        relative_error(shape.name, replayed_seconds(workload, cluster, false), estimate.step_seconds - estimate.parts.optimizer,
                       kExact, "the engine's step program, operation by operation, against simulate(); without optimizer"));
  }
  return properties;
}

// What each leaves out is a part of what is known: its share of the step bounds the difference.
std::vector<Property> bounded(const RunContext& /*context*/) {
  const ClusterSpec cluster = made_up_cluster();
  std::vector<Property> properties;
  const auto compare = [&](const std::string& name, const Workload& workload, double bound, const std::string& derivation) {
    const StepEstimate estimate = simulate(workload, cluster);
    properties.push_back(
        relative_error(name, replayed_seconds(workload, cluster, true), estimate.step_seconds, bound, derivation));
  };
  Workload data = overlapping(gpt_workload("1.7b", {.data = 8}, 32, 2), false);
  // Biases and norms, 13 h of 12 h^2 elements a layer, are in the engine's buckets and in its update.
  const auto hidden = static_cast<double>(data.model.hidden);
  compare("data 8", data, 13 / (12 * hidden) + kExact,
          "gradients and updates of biases and norms: 13 / (12 h) of a part of the step");
  data = overlapping(data, true);
  data.plan.buckets.bucket_bytes = static_cast<std::int64_t>(12 * hidden * hidden * 4);
  const StepEstimate behind = simulate(data, cluster);
  const double bucket = 12 * hidden * hidden * 4 * 2 / cluster.levels[0].bytes_per_second;
  compare("data 8, overlapped", data, 2 * bucket / behind.step_seconds + 13 / (12 * hidden),
          "when the last bucket is ready: to within one, and the table's and the first layer's are two");
  Workload recomputed = overlapping(gpt_workload("7.5b", {.tensor = 4}, 4, 2), false);
  recomputed.plan.recompute.mode = "full";
  const StepEstimate again = simulate(recomputed, cluster);
  compare("tensor 4, full recomputation", recomputed, (0.5 * again.parts.recompute + again.parts.tensor / 6) / again.step_seconds,
          "the engine leaves out the product whose result was kept, less than half of what is computed again, and its sum, one "
          "of six");
  Workload interleaved = overlapping(gpt_workload("7.5b", {.pipeline = 4}, 8, 8), false);
  interleaved.plan.pipeline = {.schedule = "interleaved", .chunks = 3};
  const StepEstimate chunks = simulate(interleaved, cluster);
  compare("interleaved 4 x 3", interleaved, (chunks.parts.bubble + chunks.parts.pipeline) / chunks.step_seconds,
          "the engine makes the head's gradients in its forward slot: waits move, by no more than all of them");
  return properties;
}

std::vector<Property> pipelines(const RunContext& context) {
  std::vector<Property> properties;
  for (const auto& [schedule, chunks] :
       std::vector<std::pair<std::string, int>>{{"gpipe", 1}, {"1f1b", 1}, {"interleaved", 3}, {"zb-h1", 1}}) {
    for (const int micro_batches : {16, 4096}) {
      constexpr int kRanks = 8;
      if (schedule == "gpipe" && micro_batches > 16) continue;
      TrainingPlan plan;
      plan.parallel.pipeline = kRanks;
      plan.pipeline = {.schedule = schedule, .chunks = chunks};
      GptConfig model;
      model.layers = kRanks * chunks;
      const auto stages = static_cast<std::size_t>(model.layers);
      const std::vector<double> unit(stages, 1.0 / chunks);
      const PipelineTimes times{unit, unit, unit, std::vector<double>(stages - 1, 0)};
      const double end = play_pipeline(plan.pipeline, pipeline_layout(plan, model), micro_batches, times).end();
      properties.push_back(relative_error(fmt::format("idle of {}, {} micro-batches", schedule, micro_batches),
                                          1 - 3.0 * micro_batches / end,
                                          reference::pipeline_bubble_share(schedule, {kRanks, chunks, micro_batches}), kExact,
                                          "closed form; long schedules are played short and continued by their period"));
    }
  }
  // The whole simulator, with layers enough that embedding and head weigh little.
  Workload workload = overlapping(gpt_workload("175b", {.tensor = 8, .pipeline = 4}, 16, 16), false);
  workload.plan.pipeline = {.schedule = "interleaved", .chunks = 4};
  workload.model.vocabulary = 1024;
  ClusterSpec cluster = made_up_cluster();
  cluster.levels[0].bytes_per_second = 1e18;
  cluster.levels[0].latency_seconds = 0;
  const StepEstimate estimate = simulate(workload, cluster, {.pitfalls = context.pitfalls});
  const double busy = estimate.parts.compute;
  properties.push_back(relative_error("bubble of GPT-175B, interleaved 4 x 4",
                                      estimate.parts.bubble / (busy + estimate.parts.bubble), reference::bubble_share(4, 16, 4),
                                      0.1,
                                      "messages free; embedding and head, less than a tenth of a chunk, are on two stages only"));
  return properties;
}

std::vector<Property> utilization_of(const RunContext& context) {
  std::vector<Property> properties;
  const ClusterSpec cluster = made_up_cluster();
  for (const bool recomputes : {false, true}) {
    Workload workload = gpt_workload("22b", {.data = 4, .tensor = 8}, 64, 4);
    if (recomputes) workload.plan.recompute.mode = "full";
    const StepEstimate estimate = simulate(workload, cluster, {.pitfalls = context.pitfalls});
    const ModelShape& model = workload.model;
    const reference::GptSize size{.rows = static_cast<double>(workload.plan.batch.rows),
                                  .sequence = static_cast<double>(model.sequence),
                                  .layers = static_cast<double>(model.layers),
                                  .hidden = static_cast<double>(model.hidden),
                                  .vocabulary = static_cast<double>(model.vocabulary)};
    const double available = estimate.step_seconds * workload.plan.parallel.world_size() * cluster.device.peak_flops.at("bf16");
    const std::string which = recomputes ? "full recomputation" : "no recomputation";
    properties.push_back(relative_error("model_flops_utilization, " + which, estimate.model_flops_utilization,
                                        reference::gpt_step_flops(size, false) / available, kExact,
                                        "work of the model, whatever is done again, over what the devices could do"));
    properties.push_back(relative_error("hardware_flops_utilization, " + which, estimate.hardware_flops_utilization,
                                        reference::gpt_step_flops(size, recomputes) / available, kExact,
                                        "72, and with what is done again 96, B s L h^2"));
  }
  return properties;
}

// One input changed: the step must move, and in this direction.
struct Change {
  std::string name;
  std::function<void(Workload&, ClusterSpec&)> change;
  bool faster = true;
};

std::vector<Property> liveness(const RunContext& /*context*/) {
  const auto base = [](Workload& workload, ClusterSpec& cluster) {
    workload = gpt_workload("22b", {.data = 8, .tensor = 4, .pipeline = 4}, 256, 8);
    workload.plan.sequence_parallel = true;
    cluster = made_up_nodes(8);
    cluster.device.constants["kernel_seconds"] = 3e-6;
  };
  const auto level = [](std::size_t i, double NetworkLevel::*field, double factor) {
    return [=](Workload&, ClusterSpec& cluster) { cluster.levels[i].*field *= factor; };
  };
  const std::vector<Change> changes = {
      {"node bandwidth doubled", level(0, &NetworkLevel::bytes_per_second, 2)},
      {"network bandwidth doubled", level(1, &NetworkLevel::bytes_per_second, 2)},
      {"node latency tenfold", level(0, &NetworkLevel::latency_seconds, 10), false},
      {"network latency tenfold", level(1, &NetworkLevel::latency_seconds, 10), false},
      {"network efficiency halved", level(1, &NetworkLevel::efficiency, 0.5), false},
      {"network oversubscribed", level(1, &NetworkLevel::oversubscription, 4), false},
      {"peak doubled", [](Workload&, ClusterSpec& cluster) { cluster.device.peak_flops["bf16"] *= 2; }},
      {"memory bandwidth doubled", [](Workload&, ClusterSpec& cluster) { cluster.device.memory_bytes_per_second *= 2; }},
      {"kernel launch tenfold", [](Workload&, ClusterSpec& cluster) { cluster.device.constants["kernel_seconds"] *= 10; }, false},
      {"twice the micro-batches", [](Workload& workload, ClusterSpec&) { workload.plan.batch.micro_batches *= 2; }},
      {"full recomputation", [](Workload& workload, ClusterSpec&) { workload.plan.recompute.mode = "full"; }, false},
      {"twice the batch", [](Workload& workload, ClusterSpec&) { workload.plan.batch.rows *= 2; }, false},
      {"gradients not overlapped", [](Workload& workload, ClusterSpec&) { workload.software.overlap_gradients = false; }, false},
      {"attention not fused", [](Workload& workload, ClusterSpec&) { workload.software.fused_attention = false; }, false},
      {"three chunks a rank",
       [](Workload& workload, ClusterSpec&) { workload.plan.pipeline = {.schedule = "interleaved", .chunks = 3}; }},
      {"zero 3 without overlap",
       [](Workload& workload, ClusterSpec&) {
         workload.plan.zero_stage = 3;
         workload.software.overlap_gradients = workload.software.overlap_parameters = false;
       },
       false}};
  Workload workload;
  ClusterSpec cluster;
  base(workload, cluster);
  const double seconds = simulate(workload, cluster).step_seconds;
  std::vector<Property> properties;
  for (const Change& change : changes) {
    base(workload, cluster);
    change.change(workload, cluster);
    const double changed = simulate(workload, cluster).step_seconds;
    const double ratio = change.faster ? seconds / changed : changed / seconds;
    properties.push_back(
        {change.name, ratio, Relation::at_least, 1 + 1e-5,
         fmt::format("{:.4f} s became {:.4f}: it must become {}", seconds, changed, change.faster ? "faster" : "slower"), -1,
         ""});
  }
  return properties;
}

}  // namespace

void add_scaling_simulator_cases(CaseList& cases) {
  cases.push_back(scaling_case("bubble/simulator", "idle share of the simulator's pipelines is the closed form", pipelines));
  cases.push_back(scaling_case("simulator/exact", "simulate() is the replayed step program where nothing overlaps", exact));
  cases.push_back(scaling_case("simulator/bounded", "simulate() is near the replayed step program elsewhere", bounded));
  cases.push_back(scaling_case("utilization", "model and hardware FLOPs of a step over the peak", utilization_of));
  cases.push_back(scaling_case("liveness", "every input moves the step, and in its direction", liveness));
}

}  // namespace tandem
