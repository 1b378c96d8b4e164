// SPDX-License-Identifier: Apache-2.0
// Recomputation: activations that are not kept but computed again in the backward pass, bit for bit.
// docs/techniques/recomputation.md
#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "reference/recomputation.h"
#include "suites/benefits.h"
#include "suites/parallel_cases.h"
#include "suites/recomputation_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "recomputation";

double activation_peak(const PairInputs& inputs) {
  return static_cast<double>(predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind,
                                            inputs.data->sequence())[static_cast<std::size_t>(MemoryCategory::activations)]);
}

// Selective recomputation repeats the core of attention where that is materialized, and no other product.
double expected_flops(const PairInputs& inputs) {
  const std::int64_t sequence = inputs.data->sequence();
  const reference::RecomputationSize size{.tokens = inputs.plan.batch.rows * sequence, .sequence = sequence};
  if (inputs.plan.recompute.mode == "selective") {
    if (inputs.plan.attention != "materialized") return 0;
    return inputs.model.layers * reference::attention_core_flops(inputs.model, size);
  }
  double flops = 0;
  for (const Interval& layers : pipeline_layout(inputs.plan, inputs.model).layers) {
    for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
      flops += reference::recomputed_flops(inputs.model, size, block_storage(inputs.plan.recompute, layers, layer).out);
    }
  }
  return flops;
}

// The formula that predicted_peak() sums, written out for a stage without groups, is the reference's.
Property formula_is_the_references(const PairInputs& inputs) {
  PairInputs more = inputs;
  more.model.layers += inputs.plan.parallel.pipeline * inputs.plan.pipeline.chunks;
  const double a_layer = reference::activation_bytes(inputs.model, layer_size(inputs), inputs.plan.recompute.mode);
  const std::vector<int> in_flight = facts_of(inputs).peak_in_flight;
  const double expected = a_layer * *std::max_element(in_flight.begin(), in_flight.end());
  return {"bytes_of_one_more_layer_a_stage",
          activation_peak(more) - activation_peak(inputs),
          Relation::equal,
          expected,
          "in-flight micro-batches * reference/recomputation.h",
          -1,
          ""};
}

// A schedule that puts weight parts off keeps until then what was computed again: less is kept only of what waits for its
// backward pass. The last rank has nothing that waits, the first one puts nothing off.
bool keeps_for_weight_parts(const PairInputs& inputs) { return inputs.plan.pipeline.schedule.starts_with("zb-"); }

// Of the fullest rank, or of the first.
double measured_peak(const EngineRun& run, bool of_first_rank) {
  const BytesByCategory& peak = of_first_rank ? run.peak_bytes.front() : run.measured.peak_bytes;
  return static_cast<double>(peak[static_cast<std::size_t>(MemoryCategory::activations)]);
}

// What is computed again was counted in the forward pass: totals of the step are not those of the state, which bits compare.
Property routing_counted_once(const EngineRun& run, const EngineRun& everything_kept) {
  double differing = 0;
  for (std::size_t step = 0; step < everything_kept.auxiliary_losses.size(); ++step) {
    const bool same = run.auxiliary_losses.at(step) == everything_kept.auxiliary_losses[step] &&
                      run.kept_assignments.at(step) == everything_kept.kept_assignments[step] &&
                      run.dropped_assignments.at(step) == everything_kept.dropped_assignments[step];
    differing += same ? 0 : 1;
  }
  return {"steps_with_other_routing_totals",
          differing,
          Relation::equal,
          0.0,
          "load-balancing loss, kept and dropped assignments, as without recomputation",
          -1,
          ""};
}

std::vector<Property> benefits(const PairInputs& inputs, const PairInputs& plain, const EngineRun& run,
                               const EngineRun& everything_kept) {
  std::vector<Property> all = {proven_program(inputs), activations_as_predicted(inputs, run.measured)};
  const bool one_stage = inputs.plan.parallel.pipeline == 1;
  if (one_stage) all.push_back(activations_near_prediction(run.measured, inputs.plan.recompute.mode));
  const bool put_off = keeps_for_weight_parts(inputs);
  const double share = measured_peak(run, put_off) / measured_peak(everything_kept, put_off);
  // A switch that saves nothing is broken, whatever its formula says.
  all.push_back({"activation_share", share, Relation::at_most, 0.8, "less than it was", -1, ""});
  if (!put_off) {
    const double formulas = activation_peak(inputs) / activation_peak(plain);
    all.push_back({"activation_share_of_no_recomputation", measured_peak(run, false) / activation_peak(plain), Relation::at_most,
                   1.1 * formulas, "1.1 * the formulas' ratio (docs/measuring.md)", -1, ""});
    if (inputs.plan.recompute.layers == 1) all.push_back(formula_is_the_references(inputs));
  }
  // Experts compute places, not tokens: the step programs alone count those.
  if (inputs.model.experts > 0) {
    all.push_back(routing_counted_once(run, everything_kept));
    return all;
  }
  all.push_back({"recomputed_flops", step_flops(inputs).recomputed, Relation::equal, expected_flops(inputs),
                 "reference/recomputation.h; selective repeats the core of materialized attention alone", -1, ""});
  return all;
}

// The engine without recomputation is the truth, to the last bit.
Case bitwise_case(const std::string& name, const ParallelVariant& variant, bool quick = true) {
  ParallelVariant plain = variant;
  plain.recompute = {};
  Case result;
  const PairInputs shown = inputs_of(variant, {});
  result.suite = kSuite;
  result.name = fmt::format("{}/{}", kSuite, name);
  result.summary = fmt::format("{}, {}: the same bits in less memory", describe_layout(shown.plan), shown.plan.recompute.mode);
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::bitwise;
  result.quick = quick;
  result.execute = [variant, plain](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    const PairInputs without = inputs_of(plain, context);
    CaseEvidence evidence;
    EngineRun everything_kept = engine_run(without, context, " everything kept");
    EngineRun run = engine_run(inputs, context, " recomputed");
    evidence.properties = benefits(inputs, without, run, everything_kept);
    evidence.truth = std::move(everything_kept.evidence);
    evidence.candidate = std::move(run.evidence);
    evidence.measured = std::move(run.measured);
    return evidence;
  };
  return result;
}

void add_materialized_and_16_bit(CaseList& cases) {
  const RecomputeConfig selective{"selective", 1};
  const RecomputeConfig full{"full", 1};
  const RecomputeConfig every2{"full", 2};
  const auto add = [&](const std::string& name, ParallelVariant variant) {
    if (name.find("materialized") != std::string::npos) variant.attention = "materialized";
    cases.push_back(bitwise_case(name + "/bitwise", variant));
  };
  add("selective/materialized", {.micro_batches = 2, .layers = 4, .recompute = selective});
  add("full/materialized", {.micro_batches = 2, .layers = 4, .row_shape = RowShape::packed, .recompute = full});
  add("every2/materialized", {.layers = 6, .recompute = every2});
  add("selective/materialized/data3", {.degrees = {.data = 3}, .micro_batches = 2, .layers = 4, .recompute = selective});
  add("selective/materialized/tensor2/sequence",
      {.degrees = {.tensor = 2}, .sequence_parallel = true, .layers = 4, .recompute = selective});
  add("selective/materialized/tensor2/pipeline2",
      {.degrees = {.tensor = 2, .pipeline = 2}, .micro_batches = 3, .layers = 8, .recompute = selective});
  add("selective/materialized/experts",
      {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2, .layers = 3, .recompute = selective});
  add("full/pipeline2/zb-h1",
      {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "zb-h1"}, .micro_batches = 4, .layers = 8, .recompute = full});
  add("selective/bf16", {.micro_batches = 2, .layers = 4, .precision = "bf16", .recompute = selective});
  add("full/bf16/tensor2", {.degrees = {.tensor = 2}, .layers = 4, .precision = "bf16", .recompute = full});
  add("selective/materialized/bf16", {.micro_batches = 2, .layers = 4, .precision = "bf16", .recompute = selective});
  add("every2/materialized/bf16/data2",
      {.degrees = {.data = 2}, .micro_batches = 2, .layers = 6, .precision = "bf16", .recompute = every2});
  add("full/fp8", {.micro_batches = 2, .layers = 4, .precision = "fp8", .recompute = full});
}

}  // namespace

reference::RecomputationSize layer_size(const PairInputs& inputs) {
  const LocalModel local = local_model(inputs.model, inputs.plan, ProcessGrid(inputs.plan), 0);
  const MicroBatchShape shape = micro_batch_shape(local, inputs.plan.batch, inputs.data->sequence(), 0);
  reference::RecomputationSize size;
  size.tokens = shape.tokens();
  size.sequence = inputs.data->sequence();
  size.tensor_ranks = inputs.plan.parallel.tensor;
  size.sequence_parallel = inputs.plan.sequence_parallel;
  size.bytes = static_cast<int>(size_bytes(inputs.plan.numerics.storage));
  size.materialized = inputs.plan.attention == "materialized";
  size.expert_ranks = inputs.plan.parallel.expert;
  size.expert_group_rows = std::accumulate(shape.peer_rows.begin(), shape.peer_rows.end(), std::int64_t{0});
  return size;
}

StepFlops step_flops(const PairInputs& inputs) {
  StepFlops flops;
  for (const StepProgram& program : programs_of(inputs)) {
    for (const Operation& op : program) {
      flops.all += op.flops;
      if (op.phase == Phase::recompute) flops.recomputed += op.flops;
    }
  }
  return flops;
}

void add_recomputation_cases(CaseList& cases) {
  const RecomputeConfig selective{"selective", 1};
  const RecomputeConfig full{"full", 1};
  const RecomputeConfig every3{"full", 3};
  const auto add = [&](const std::string& name, const ParallelVariant& variant) { cases.push_back(bitwise_case(name, variant)); };
  add("selective/bitwise", {.micro_batches = 2, .layers = 4, .recompute = selective});
  add("full/bitwise", {.micro_batches = 2, .layers = 6, .recompute = full});
  add("every3/bitwise", {.layers = 8, .recompute = every3});
  add("full/no_dropout/bitwise", {.layers = 6, .dropout = 0.0, .recompute = full});
  add("selective/data3/bitwise", {.degrees = {.data = 3}, .micro_batches = 2, .layers = 4, .recompute = selective});
  add("selective/tensor2/sequence/bitwise",
      {.degrees = {.tensor = 2}, .sequence_parallel = true, .layers = 4, .recompute = selective});
  add("full/tensor2/pipeline2/bitwise",
      {.degrees = {.tensor = 2, .pipeline = 2}, .micro_batches = 3, .layers = 8, .recompute = full});
  add("full/context2/bitwise", {.degrees = {.context = 2}, .layers = 6, .recompute = full});
  add("full/experts/bitwise", {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2, .layers = 3, .recompute = full});
  add("selective/experts/bitwise",
      {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 1, .layers = 5, .recompute = selective});
  add_materialized_and_16_bit(cases);
  // Beside the reference, too: two runs of one engine could share a mistake.
  const auto pair = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(parallel_case(kSuite, name, variant, {}));
  };
  pair("full/fp32", {.micro_batches = 2, .layers = 3, .recompute = full});
  pair("none/materialized/fp32", {.micro_batches = 2, .layers = 3, .attention = "materialized"});
  pair("selective/materialized/tensor2/fp32", {.degrees = {.tensor = 2},
                                               .layers = 3,
                                               .row_shape = RowShape::packed,
                                               .recompute = selective,
                                               .attention = "materialized"});
  add_recomputation_memory_cases(cases);
  add_recomputation_time_cases(cases);
}

}  // namespace tandem
