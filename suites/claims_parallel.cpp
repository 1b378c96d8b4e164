// SPDX-License-Identifier: Apache-2.0
// What each way of sharing the work costs, where it belongs, and when there is too much of it: C06, C07, C08.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "optimized/machine.h"
#include "optimized/memory/arena.h"
#include "optimized/scaling/simulator.h"
#include "suites/benefits.h"
#include "suites/bubble.h"
#include "suites/claims_parts.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

ParallelVariant shared_by(ParallelDegrees degrees, int layers) {
  return {.degrees = degrees,
          .rows = 8,
          .layers = layers,
          .vocabulary = 64,
          .dropout = 0.0,
          .row_shape = RowShape::full,
          .hidden = 48,
          .heads = 8,
          .mlp_hidden = 192};
}

double measured_bubble(const StatedRun& run) {
  const std::vector<double> all = measured_bubbles(run.run.measured, run.inputs.steps);
  return *std::min_element(all.begin(), all.end());
}

double state_peak(const EngineRun& run) {
  return peak_bytes(run, MemoryCategory::parameters) + peak_bytes(run, MemoryCategory::gradients) +
         peak_bytes(run, MemoryCategory::optimizer);
}

double state_forecast(const PairInputs& inputs) {
  const BytesByCategory bytes = predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind, inputs.data->sequence());
  double sum = 0;
  for (const MemoryCategory category : {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer})
    sum += static_cast<double>(bytes[static_cast<std::size_t>(category)]);
  return sum;
}

// ---- C06

ClaimFindings find_trade_offs(const RunContext& context) {
  const LinkProfile link = stated_link(1e-3, 5e7);
  constexpr double kForward = 0.04;
  ParallelVariant pipelined = shared_by({.pipeline = 4}, 4);
  pipelined.micro_batches = 4;
  const StatedRun data = stated_run(shared_by({.data = 4}, 4), kForward, link, context);
  const StatedRun tensor = stated_run(shared_by({.tensor = 4}, 4), kForward, link, context);
  const StatedRun pipeline = stated_run(pipelined, kForward, link, context);
  ClaimFindings found;
  const auto compare = [&](const std::string& key, const StatedRun& run, const std::string& axis) {
    found.figures.push_back({"memory_" + key, "model state of a rank over data 4, " + axis, kNoFigure,
                             state_forecast(run.inputs) / state_forecast(data.inputs), state_peak(run.run) / state_peak(data.run),
                             "x"});
    found.figures.push_back({"bytes_" + key, "bytes that a rank sends a step, " + axis, kNoFigure,
                             programmed_bytes_per_rank(run.inputs), bytes_per_rank_and_step(run.inputs, run.run), "B"});
    found.figures.push_back({"messages_" + key, "operations of communication of a rank and step, " + axis, kNoFigure,
                             operations_per_rank(run.inputs), operations_of(run), "operations"});
    found.figures.push_back({"speed_" + key, "tokens a second over data 4, " + axis, kNoFigure,
                             data.predicted_step_seconds / run.predicted_step_seconds, data.step_seconds / run.step_seconds,
                             "x"});
  };
  compare("tensor", tensor, "tensor 4");
  compare("pipeline", pipeline, "pipeline 4");
  compare("data", data, "data 4");
  found.figures.push_back({"bubble", "idle share of pipeline 4 with 4 micro-batches: (p - 1)/(m + p - 1)", kNoFigure, 3.0 / 7,
                           measured_bubble(pipeline), "share"});
  return found;
}

Claim trade_offs() {
  return {
      "C06",
      "3.1",
      "DP scales throughput at high gradient traffic; TP relieves a layer's memory at frequent traffic; PP relieves depth at the "
      "price of bubbles",
      "tandem run data_parallel tensor_parallel pipeline_parallel",
      find_trade_offs,
      {{"memory_tensor", Of::measured, Relation::at_most, 0.5, ClaimVerdict::does_not_hold, "TP relieves no memory."},
       {"memory_pipeline", Of::measured, Relation::at_most, 0.6, ClaimVerdict::does_not_hold, "PP relieves no memory."},
       {"messages_tensor", Of::measured, Relation::at_least, 4, ClaimVerdict::does_not_hold, "TP communicates hardly ever."},
       {"bubble", Of::measured, Relation::at_least, 0.2, ClaimVerdict::does_not_hold, "PP has no bubble."},
       {"speed_tensor", Of::measured, Relation::at_most, 1, ClaimVerdict::imprecise, "TP is faster than DP here."},
       {"speed_pipeline", Of::measured, Relation::at_most, 1, ClaimVerdict::imprecise, "PP is faster than DP here."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "The same work on 4 ranks: state of a rank 1 (DP), {:.2f} (TP), {:.2f} (PP); operations a step {:.1f}, "
            "{:.0f}, {:.0f}; kB sent {:.0f}, {:.0f}, {:.0f}; tokens a second 1, {:.2f}, {:.2f}; PP idles {:.0f} %.",
            f.measured("memory_tensor"), f.measured("memory_pipeline"), f.measured("messages_data"),
            f.measured("messages_tensor"), f.measured("messages_pipeline"), f.measured("bytes_data") * 1e-3,
            f.measured("bytes_tensor") * 1e-3, f.measured("bytes_pipeline") * 1e-3, f.measured("speed_tensor"),
            f.measured("speed_pipeline"), 100 * f.measured("bubble"));
      }};
}

// ---- C07

// Step seconds of the best order of ranks with each axis inside the node.
struct Placements {
  double tensor = 0, data = 0, pipeline = 0;  // the axis whose neighbours share a node
  [[nodiscard]] double gain() const { return std::min(data, pipeline) / tensor; }
};

using StepSeconds = std::function<double(const std::string& rank_order)>;

Placements place(const StepSeconds& seconds, bool all) {
  const auto best = [&](const std::string& first, const std::string& second, const std::string& third) {
    const auto order = [&](const std::string& b, const std::string& c) { return first + "-context-" + b + "-" + c; };
    const double one = seconds(order(second, third));
    return all ? std::min(one, seconds(order(third, second))) : one;
  };
  return {best("tensor", "data", "pipeline"), best("data", "tensor", "pipeline"), best("pipeline", "tensor", "data")};
}

// Nodes of two ranks, the links between them ten times slower.
Placements place_here(ParallelVariant variant, const LinkLevel& in_node, bool measured, bool all, const RunContext& context) {
  variant.degrees = {.data = 2, .tensor = 2, .pipeline = 2};
  const LinkProfile link = stated_nodes(2, in_node.latency_seconds, in_node.bytes_per_second, 10);
  return place(
      [&](const std::string& order) {
        variant.rank_order = order;
        return measured ? stated_run(variant, 0.04, link, context).step_seconds
                        : stated_prediction(variant, 0.04, link, context).predicted_step_seconds;
      },
      all);
}

Placements place_on_cluster() {
  const ClusterSpec cluster = read_cluster("dgx-a100");
  Workload workload;
  workload.model = read_model_shape("gpt3-175b");
  workload.plan.parallel = {.data = 8, .tensor = 8, .pipeline = 8};
  workload.plan.precision = "bf16";
  workload.plan.numerics = numerics_from_precision("bf16");
  workload.plan.batch = {1536, 192};
  workload.plan.sequence_parallel = true;
  workload.plan.recompute.mode = "selective";
  return place(
      [&](const std::string& order) {
        workload.plan.rank_order = order;
        return simulate(workload, cluster).step_seconds;
      },
      true);
}

ClaimFindings find_placements(ClaimEffort effort, const RunContext& context) {
  const bool all = effort == ClaimEffort::usual;
  ParallelVariant many_tokens = shared_by({}, 4);
  many_tokens.rows = 32;
  many_tokens.micro_batches = 2;
  many_tokens.hidden = 24;
  many_tokens.mlp_hidden = 96;
  ParallelVariant few_tokens = shared_by({}, 2);
  few_tokens.rows = 2;
  few_tokens.hidden = 96;
  few_tokens.mlp_hidden = 384;
  const LinkLevel usual{2e-4, 1e8, 0}, narrow{2e-5, 3e7, 0};  // the second is all bandwidth
  const Placements predicted = place_here(many_tokens, usual, false, true, context);
  const Placements measured = place_here(many_tokens, usual, true, all, context);
  const Placements few_predicted = place_here(few_tokens, narrow, false, true, context);
  const Placements few = place_here(few_tokens, narrow, true, false, context);
  ClaimFindings found;
  found.figures = {{"gain", "step with TP across nodes over TP inside, best other placement", kNoFigure, predicted.gain(),
                    measured.gain(), "x"},
                   {"tensor", "step, TP inside the node", kNoFigure, predicted.tensor, measured.tensor, "s"},
                   {"data", "step, DP inside the node", kNoFigure, predicted.data, measured.data, "s"},
                   {"pipeline", "step, PP inside the node", kNoFigure, predicted.pipeline, measured.pipeline, "s"},
                   {"cluster", "TP across nodes over inside, GPT-3 175B as 8 x 8 x 8 on DGX A100, simulated", kNoFigure,
                    place_on_cluster().gain(), kNoFigure, "x"},
                   {"few", "TP across nodes over inside, wide model and 17 tokens a replica", kNoFigure, few_predicted.gain(),
                    few.gain(), "x"},
                   {"tokens", "tokens a replica and step from which TP sends more than DP, GPT-3 175B, t = 8: 3 h/t", kNoFigure,
                    3.0 * 12288 / 8, kNoFigure, "tokens"}};
  found.not_measured = "Nodes with real networks: the links here are made slow on purpose.";
  return found;
}

Claim placements(ClaimEffort effort) {
  return {
      "C07",
      "3.1",
      "TP belongs inside a node, PP and DP across nodes",
      "tandem run scaling; tandem plan --model gpt3-175b --cluster dgx-a100 --gpus 512",
      [effort](const RunContext& context) { return find_placements(effort, context); },
      {{"gain", Of::measured, Relation::at_least, 1.05, ClaimVerdict::does_not_hold, "TP across nodes is as fast as inside."},
       {"cluster", Of::predicted, Relation::at_least, 1.05, ClaimVerdict::does_not_hold,
        "On the cluster TP across nodes is as fast as inside."},
       {"few", Of::measured, Relation::at_least, 1, ClaimVerdict::holds_within_limits,
        "Limit: as long as a replica works on more than about 3 h/t tokens a step; with fewer the gradients are more than the "
        "activations, and DP is better off inside."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "On nodes of two with links ten times slower between them a step takes {:.0f} ms with TP inside, {:.0f} "
            "with DP and {:.0f} with PP inside: {:.2f} x (predicted {:.2f}); GPT-3 175B on 64 DGX A100 {:.2f} x, "
            "simulated. With few tokens and a wide model {:.2f} x.",
            1e3 * f.measured("tensor"), 1e3 * f.measured("data"), 1e3 * f.measured("pipeline"), f.measured("gain"),
            f.predicted("gain"), f.predicted("cluster"), f.measured("few"));
      }};
}

// ---- C08

// Rate of one thread's products of an MLP that is cut over tensor ranks: [tokens, hidden] x [hidden, width], and back.
double product_rate(std::int64_t tokens, std::int64_t hidden, std::int64_t width, int repetitions) {
  const auto kernels = make_kernels({});
  Arena arena;
  const Shape shapes[] = {{tokens, hidden}, {hidden, width}, {tokens, width}, {width, hidden}, {tokens, hidden}};
  std::vector<Arena::Buffer> blocks;
  std::vector<TensorView> views;
  for (const Shape& shape : shapes) {
    blocks.push_back(arena.allocate(DType::f32, shape, MemoryCategory::workspace));
    views.push_back(blocks.back().view(DType::f32, shape));
    auto* const values = static_cast<float*>(views.back().data());
    for (std::int64_t i = 0; i < views.back().num_elements(); ++i) values[i] = 1e-3F * static_cast<float>(i % 997);
  }
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= repetitions; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    kernels->linear_forward(views[0], views[1], {}, views[2]);
    kernels->linear_forward(views[2], views[3], {}, views[4]);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (i > 0) least = std::min(least, seconds);
  }
  return 4.0 * static_cast<double>(tokens * hidden * width) / least;
}

ClaimFindings find_too_much(const RunContext& context) {
  const LinkProfile link = stated_link(1e-3, 5e7);
  constexpr double kForward = 0.04;
  const auto tensor = [&](int degree) { return stated_run(shared_by({.tensor = degree}, 4), kForward, link, context); };
  const StatedRun two = tensor(2), eight = tensor(8);
  const auto pipeline = [&](int ranks, int micro_batches) {
    ParallelVariant variant = shared_by({.pipeline = ranks}, 8);
    variant.micro_batches = micro_batches;
    return stated_run(variant, kForward, stated_link(0, 0), context);
  };
  const StatedRun shallow = pipeline(2, 4), deep = pipeline(8, 4);
  const ClusterSpec cluster = read_cluster("dgx-a100");
  const CostModel cost(cluster);
  const auto cluster_rate = [&](double width) {
    const double there = cost.matmul_seconds(2048, width, 4096, "bf16");
    return 4.0 * 2048 * 4096 * width / (there + cost.matmul_seconds(2048, 4096, width, "bf16"));
  };
  ClaimFindings found;
  found.figures = {
      {"efficiency", "speed-up of a step from tensor 2 to 8 over the 4 of its work", kNoFigure,
       two.predicted_step_seconds / eight.predicted_step_seconds / 4, two.step_seconds / eight.step_seconds / 4, "x"},
      {"products", "rate of an MLP's products at width 8 over width 512, fp32, one core", kNoFigure, kNoFigure,
       product_rate(256, 512, 8, 20) / product_rate(256, 512, 512, 20), "x"},
      {"products_gpu", "the same at width 64 over width 4096, bf16, A100", kNoFigure, cluster_rate(64) / cluster_rate(4096),
       kNoFigure, "x"},
      {"per_work", "operations of communication per second of a rank's computing, tensor 8 over 2", kNoFigure, 4,
       operations_of(eight) / busy_seconds(eight) / (operations_of(two) / busy_seconds(two)), "x"},
      {"bubble2", "idle share, pipeline 2, 4 micro-batches", kNoFigure, 1.0 / 5, measured_bubble(shallow), "share"},
      {"bubble8", "idle share, pipeline 8, 4 micro-batches", kNoFigure, 7.0 / 11, measured_bubble(deep), "share"}};
  return found;
}

Claim too_much() {
  return {
      "C08",
      "3.2",
      "Too much TP cuts layers too finely and multiplies messages; too much PP enlarges bubbles",
      "tandem run pipeline_parallel/ranks4/bubble scaling; tandem plan --model gpt3-175b --cluster dgx-a100 --gpus 512",
      find_too_much,
      {{"efficiency", Of::measured, Relation::at_most, 0.8, ClaimVerdict::does_not_hold,
        "Four times the tensor ranks are nearly four times as fast."},
       {"products", Of::measured, Relation::at_most, 0.9, ClaimVerdict::imprecise, "Narrow products are as efficient here."},
       {"per_work", Of::measured, Relation::at_least, 2, ClaimVerdict::does_not_hold, "Messages do not become more frequent."},
       {"bubble8", Of::measured, Relation::at_least, 0.4, ClaimVerdict::does_not_hold, "The bubble does not grow."},
       {"bubble2", Of::measured, Relation::at_most, 0.35, ClaimVerdict::imprecise, "A short pipeline idles as much."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "From tensor 2 to 8 a step gets {:.2f} of the speed-up of its work (predicted {:.2f}); a rank's products "
            "of width 8 run at {:.2f} of the rate of width 512; the bubble grows from {:.0f} % (p = 2) to {:.0f} % "
            "(p = 8) at 4 micro-batches.",
            f.measured("efficiency"), f.predicted("efficiency"), f.measured("products"), 100 * f.measured("bubble2"),
            100 * f.measured("bubble8"));
      }};
}

}  // namespace

std::vector<Claim> parallel_claims(ClaimEffort effort) { return {trade_offs(), placements(effort), too_much()}; }

}  // namespace tandem
