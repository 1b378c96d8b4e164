// SPDX-License-Identifier: Apache-2.0
// What single operations cost and what ranks hold, against closed forms that know nothing of the simulator.
#include <algorithm>

#include <fmt/format.h>

#include "harness/measurement.h"
#include "optimized/scaling/cost_model.h"
#include "optimized/scaling/memory_model.h"
#include "reference/pipeline_schedules.h"
#include "reference/scaling.h"
#include "suites/properties.h"
#include "suites/scaling_cases.h"
#include "suites/scaling_shapes.h"

namespace tandem {
namespace {

constexpr double kBytes = 64e6;

// Groups of the data axis over so many devices.
GroupPlacement group_of(int ranks, const ClusterSpec& cluster) {
  TrainingPlan plan;
  plan.parallel.data = ranks;
  return placement(plan, GroupAxis::data, cluster);
}

std::vector<Property> collectives(const RunContext& /*context*/) {
  const ClusterSpec flat = made_up_cluster();
  const CostModel costs(flat);
  const reference::Link link = {flat.levels[0].latency_seconds, 1 / flat.levels[0].bytes_per_second};
  std::vector<Property> properties;
  for (const int ranks : {2, 3, 8, 64}) {
    const GroupPlacement group = group_of(ranks, flat);
    const auto check = [&](Collective collective, double expected, const char* formula) {
      properties.push_back(relative_error(fmt::format("{} of {} ranks", name(collective), ranks),
                                          costs.collective_seconds(collective, kBytes, group), expected, kExact, formula));
    };
    check(Collective::all_reduce, reference::ring_all_reduce_seconds(ranks, kBytes, link), "ring, 2 (n - 1) (a + b / (n B))");
    check(Collective::reduce_scatter, reference::ring_half_seconds(ranks, kBytes, link), "half a ring");
    check(Collective::all_gather, reference::ring_half_seconds(ranks, kBytes, link), "half a ring");
    check(Collective::all_to_all, reference::all_to_all_seconds(ranks, kBytes, link), "(n - 1) (a + b / (n B))");
  }
  return properties;
}

// What nccl-tests calls bus bandwidth is the link's own, whatever the operation and the number of ranks.
std::vector<Property> bus_bandwidths(const RunContext& context) {
  constexpr double kBandwidth = 25e9;
  constexpr reference::Link kLink = {0, 1 / kBandwidth};
  std::vector<Property> properties;
  for (const int ranks : {2, 3, 8}) {
    const double whole = reference::ring_all_reduce_seconds(ranks, kBytes, kLink);
    const double half = reference::ring_half_seconds(ranks, kBytes, kLink);
    for (const auto& [collective, seconds] :
         {std::pair(Collective::all_reduce, whole), std::pair(Collective::reduce_scatter, half),
          std::pair(Collective::all_gather, half),
          std::pair(Collective::all_to_all, reference::all_to_all_seconds(ranks, kBytes, kLink))}) {
      const double bandwidth = bus_bandwidth(collective, kBytes, seconds, ranks, context.pitfalls);
      properties.push_back({fmt::format("bus_bandwidth_of_link, {} of {} ranks", name(collective), ranks), bandwidth / kBandwidth,
                            Relation::at_most, 1 + kExact, "a ring without latency uses all of a link, and nothing carries more",
                            -1, ""});
    }
  }
  return properties;
}

// Nodes of eight: no less than what must pass between nodes, no more than the two levels one after the other.
std::vector<Property> two_levels(const RunContext& /*context*/) {
  constexpr int kPerNode = 8;
  const ClusterSpec cluster = made_up_nodes(kPerNode);
  const CostModel costs(cluster);
  const reference::Link near = {cluster.levels[0].latency_seconds, 1 / cluster.levels[0].bytes_per_second};
  const reference::Link far = {cluster.levels[1].latency_seconds, 1 / cluster.levels[1].bytes_per_second};
  std::vector<Property> properties;
  for (const int nodes : {2, 16, 128}) {
    const double seconds = costs.collective_seconds(Collective::all_reduce, kBytes, group_of(nodes * kPerNode, cluster));
    const double crossing = 2.0 * (nodes - 1) / nodes * kBytes / kPerNode * far.beta_seconds_per_byte;
    const double slowest = reference::hierarchical_all_reduce_seconds(nodes, kPerNode, kBytes, near, far);
    properties.push_back({fmt::format("over_crossing_bytes, {} nodes", nodes), seconds / crossing, Relation::at_least, 1.0,
                          "2 (N - 1) / N of an eighth of the bytes leave each device of a node", -1, ""});
    properties.push_back({fmt::format("over_hierarchical, {} nodes", nodes), seconds / slowest, Relation::at_most, 1.0,
                          fmt::format("{:.3g} ms; one level after the other takes {:.3g}", 1e3 * seconds, 1e3 * slowest), -1,
                          ""});
  }
  return properties;
}

std::vector<Property> zero_memory(const RunContext& context) {
  std::vector<Property> properties;
  const ClusterSpec cluster = made_up_cluster();
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int ranks : {1, 8, 64}) {
      Workload workload = gpt_workload("7.5b", {.data = ranks}, ranks, 1);
      workload.plan.gradients = "stored";
      workload.plan.numerics.accumulate = workload.plan.numerics.reduce = workload.plan.numerics.storage;
      workload.plan.zero_stage = stage;
      const double expected = reference::zero_model_state_bytes(num_parameters(workload.model), ranks, stage);
      properties.push_back(relative_error(fmt::format("stage {}, {} ranks", stage, ranks),
                                          estimate_memory(workload, cluster, context.pitfalls).model_state(), expected, kExact,
                                          "bytes of parameters, gradients and Adam in mixed precision (SC 2020)"));
    }
  }
  return properties;
}

std::vector<Property> activation_memory(const RunContext& /*context*/) {
  using reference::Recomputation;
  const std::vector<std::pair<const char*, Recomputation>> modes = {
      {"none", Recomputation::none}, {"selective", Recomputation::selective}, {"full", Recomputation::full}};
  std::vector<Property> properties;
  for (const auto& [mode, recomputation] : modes) {
    for (const int tensor : {1, 8}) {
      for (const bool sliced : {false, true}) {
        if (sliced && tensor == 1) continue;
        Workload workload = gpt_workload("22b", {.tensor = tensor}, 4, 1);
        workload.software.fused_attention = false;  // the formulas count the probabilities
        workload.plan.recompute.mode = mode;
        workload.plan.sequence_parallel = sliced;
        const reference::LayerSize layer{.sequence = static_cast<double>(workload.model.sequence),
                                         .rows = 4,
                                         .hidden = static_cast<double>(workload.model.hidden),
                                         .heads = static_cast<double>(workload.model.heads),
                                         .tensor = tensor,
                                         .sequence_parallel = sliced};
        properties.push_back(relative_error(fmt::format("{}, tensor {}{}", mode, tensor, sliced ? ", sequence-parallel" : ""),
                                            activation_bytes_of_layer(workload, 4),
                                            reference::layer_activation_bytes(layer, recomputation), kExact,
                                            "bytes of a layer, Korthikanti et al., table 2"));
      }
    }
  }
  return properties;
}

std::vector<Property> flops_and_parameters(const RunContext& /*context*/) {
  std::vector<Property> properties;
  for (const char* size : {"7.5b", "22b", "175b", "1t"}) {
    const Workload workload = gpt_workload(size, {}, 1, 1);
    const ModelShape& model = workload.model;
    const reference::GptSize gpt{.rows = 1,
                                 .sequence = static_cast<double>(model.sequence),
                                 .layers = static_cast<double>(model.layers),
                                 .hidden = static_cast<double>(model.hidden),
                                 .vocabulary = static_cast<double>(model.vocabulary)};
    properties.push_back(relative_error(fmt::format("step_flops of {}", size),
                                        3 * forward_flops_per_row(model, model.sequence, AttentionFlops::full),
                                        reference::gpt_step_flops(gpt, false), kExact, "72 B s L h^2 (1 + s/6h + V/12Lh)"));
    properties.push_back(relative_error(fmt::format("parameters of {}", size), num_parameters(model) - 2 * gpt.hidden,
                                        reference::gpt_parameters_closed_form(gpt), kExact,
                                        "12 L h^2 (1 + 13/12h + (V + s)/12Lh), which leaves the final norm's 2 h out"));
  }
  return properties;
}

// The first rank of a pipeline holds the activations of as many micro-batches as there are ranks.
std::vector<Property> worst_stage(const RunContext& context) {
  constexpr int kRanks = 8, kMicroBatches = 32;
  std::vector<Property> properties;
  for (const int chunks : {1, 3}) {
    Workload workload = gpt_workload("175b", {.tensor = 8, .pipeline = kRanks}, kMicroBatches, kMicroBatches);
    workload.plan.sequence_parallel = true;
    workload.plan.pipeline = {.schedule = chunks > 1 ? "interleaved" : "1f1b", .chunks = chunks};
    const MemoryEstimate memory = estimate_memory(workload, made_up_cluster(), context.pitfalls);
    const auto in_flight = static_cast<double>(
        reference::pipeline_peak_in_flight(workload.plan.pipeline.schedule, {kRanks, chunks, kMicroBatches}, 0));
    const double layers = static_cast<double>(workload.model.layers) / (kRanks * chunks);
    const double kept = in_flight * layers * activation_bytes_of_layer(workload, 1);
    const std::string which = fmt::format("{} chunk(s)", chunks);
    properties.push_back({"activations_over_first_stage, " + which, memory.activations / kept, Relation::at_least, 1 - kExact,
                          fmt::format("{:.1f} GiB of {:.0f} chunk-micro-batches in flight on the first rank",
                                      memory.activations / (1 << 30), in_flight),
                          -1, ""});
    properties.push_back({"activations_over_first_stage_high, " + which, memory.activations / kept, Relation::at_most, 1.05,
                          "beside them the embedding's dropout mask", -1, ""});
    properties.push_back(exactly("worst_pipeline_rank, " + which, memory.worst_pipeline_rank, 0, "most are in flight there"));
  }
  return properties;
}

}  // namespace

void add_scaling_model_cases(CaseList& cases) {
  cases.push_back(
      scaling_case("collectives/one-level", "seconds of collectives on one level are the ring's closed forms", collectives));
  cases.push_back(scaling_case("collectives/bus-bandwidth", "no rate that is reported is above the link's", bus_bandwidths));
  cases.push_back(scaling_case("collectives/two-levels", "an all-reduce over nodes: between its least and its hierarchical time",
                               two_levels));
  cases.push_back(scaling_case("memory/zero", "model state of every ZeRO stage is the paper's", zero_memory));
  cases.push_back(
      scaling_case("memory/activations", "activation bytes of a layer in every mode are the paper's", activation_memory));
  cases.push_back(scaling_case("memory/worst-stage", "a pipeline's memory is that of the rank that holds most", worst_stage));
  cases.push_back(
      scaling_case("flops-and-parameters", "FLOPs of a step and parameters are the closed forms", flops_and_parameters));
}

}  // namespace tandem
