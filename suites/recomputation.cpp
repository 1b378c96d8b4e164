// SPDX-License-Identifier: Apache-2.0
// Recomputation: activations that are not kept but computed again in the backward pass, bit for bit.
// docs/techniques/recomputation.md
#include <algorithm>

#include <fmt/format.h>

#include "reference/recomputation.h"
#include "suites/benefits.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "recomputation";

double activation_peak(const PairInputs& inputs) {
  return static_cast<double>(predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind,
                                            inputs.data->sequence())[static_cast<std::size_t>(MemoryCategory::activations)]);
}

double recomputed_flops(const PairInputs& inputs) {
  double flops = 0;
  for (const StepProgram& program : programs_of(inputs)) {
    for (const Operation& op : program) flops += op.phase == Phase::recompute ? op.flops : 0;
  }
  return flops;
}

double expected_flops(const PairInputs& inputs) {
  if (inputs.plan.recompute.mode != "full") return 0;
  const std::int64_t sequence = inputs.data->sequence();
  const reference::RecomputationSize size{.tokens = inputs.plan.batch.rows * sequence, .sequence = sequence};
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
  const auto element = static_cast<int>(size_bytes(inputs.plan.numerics.storage));
  const MicroBatchShape shape = micro_batch_shape(local_model(inputs.model, inputs.plan, ProcessGrid(inputs.plan), 0),
                                                  inputs.plan.batch, inputs.data->sequence(), 0);
  const double a_layer = reference::blocked_activation_bytes(
      inputs.model,
      {shape.tokens(), inputs.data->sequence(), inputs.plan.parallel.tensor, inputs.plan.sequence_parallel, element},
      inputs.plan.recompute.mode);
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

std::vector<Property> benefits(const PairInputs& inputs, const PairInputs& plain, const EngineRun& run) {
  const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
  const auto measured = static_cast<double>(run.measured.peak_bytes[activations]);
  std::vector<Property> all = {proven_program(inputs)};
  if (inputs.model.experts > 0) return all;
  if (inputs.plan.recompute.layers == 1) all.push_back(formula_is_the_references(inputs));
  all.push_back(activations_as_predicted(inputs, run.measured));
  all.push_back({"activation_share_of_no_recomputation", measured / activation_peak(plain), Relation::at_most,
                 1.1 * activation_peak(inputs) / activation_peak(plain), "1.1 * the formulas' ratio (docs/measuring.md)", -1,
                 ""});
  // A switch that saves nothing is broken, whatever its formula says.
  all.push_back({"activation_share", measured / activation_peak(plain), Relation::at_most, 0.8, "less than it was", -1, ""});
  all.push_back({"recomputed_flops", recomputed_flops(inputs), Relation::equal, expected_flops(inputs),
                 "reference/recomputation.h a layer for full; selective repeats no product", -1, ""});
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
    evidence.truth = engine_run(without, context, " everything kept").evidence;
    EngineRun run = engine_run(inputs, context, " recomputed");
    evidence.properties = benefits(inputs, without, run);
    evidence.candidate = std::move(run.evidence);
    evidence.measured = std::move(run.measured);
    return evidence;
  };
  return result;
}

}  // namespace

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
      {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 1, .layers = 3, .recompute = selective});
  // Beside the reference, too: two runs of one engine could share a mistake.
  cases.push_back(parallel_case(kSuite, "full/fp32", {.micro_batches = 2, .layers = 3, .recompute = full}, {}));
}

}  // namespace tandem
