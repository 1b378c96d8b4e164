// SPDX-License-Identifier: Apache-2.0
// Layouts in 16 bits against the reference in the same precision, and what 16 bits cost and save.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/loss_scaling_cases.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "loss_scaling";

double peak(const EngineRun& run, MemoryCategory category) {
  return static_cast<double>(run.measured.peak_bytes[static_cast<std::size_t>(category)]);
}

Property no_overflow(const EngineRun& run) {
  double bad = 0;
  for (const double loss : run.evidence.losses) bad += loss == loss ? 0 : 1;
  return {"losses_not_finite", bad, Relation::equal, 0.0, "nothing overflows at this scale", -1, ""};
}

// Of the gradients of step 0, the tensor that is farthest from the reference which rounds at the same places, over the error that
// rounding there causes at all (in that reference, against double). Two right programs differ where sums in another order fall on
// the other side of a rounding, and in what follows from that. One flip moves all later numbers of its row a little and flips
// some of them: the distance is no rounding error of sums, but it stays below that of unrelated roundings, sqrt(2). A rounding
// too many or at another place is a part of the whole error on its own. Partial sums that travel between ranks in 16 bits are
// rounded once more than the reference's.
Property same_roundings(const PairInputs& inputs, const EngineRun& run) {
  PairInputs one = inputs;
  one.steps = 0;
  const Evidence truth = reference_evidence<double>(one, 1, 1);
  const Evidence same = reference_evidence<float>(one, inputs.plan.parallel.data, inputs.plan.batch.micro_batches);
  const bool partial_sums =
      inputs.plan.parallel.tensor > 1 || inputs.plan.parallel.context > 1 || inputs.plan.gradients == "stored";
  Property worst{"distance_over_rounding_error",
                 0,
                 Relation::at_most,
                 partial_sums ? 4.0 : 0.7,
                 partial_sums ? "partial sums travel in 16 bits, one more rounding each: the factor that judges errors, with the "
                                "reference's own error alone"
                              : "most roundings fall the same way: half of sqrt(2), the distance of unrelated ones",
                 0,
                 ""};
  const auto gradients = [](const Evidence& side) { return *std::ranges::find(side.stages, kGradients, &StageEvidence::stage); };
  const StageEvidence exact = gradients(truth);
  const StageEvidence expected = gradients(same);
  const StageEvidence found = gradients(run.evidence);
  for (std::size_t t = 0; t < exact.tensors.size(); ++t) {
    if (exact.tensors[t].true_value_is_zero) continue;
    double distance = 0;
    double error = 0;
    for (std::size_t i = 0; i < exact.tensors[t].values.size(); ++i) {
      distance += std::pow(found.tensors[t].values[i] - expected.tensors[t].values[i], 2);
      error += std::pow(expected.tensors[t].values[i] - exact.tensors[t].values[i], 2);
    }
    const double ratio = std::sqrt(distance / error);
    if (ratio <= worst.value) continue;
    worst.value = ratio;
    worst.tensor = exact.tensors[t].name;
  }
  return worst;
}

std::vector<Property> plain_benefits(const PairInputs& inputs, const EngineRun& run) {
  return {same_roundings(inputs, run), no_overflow(run), activations_as_predicted(inputs, run.measured),
          state_as_predicted(inputs, run.measured)};
}

// ---- memory

// Activations of a rank that have two bytes instead of four, and those that stay wide: mean and rstd of both norms of a layer, of
// the last norm, log-sum-exp of each head.
double expected_activation_share(const PairInputs& inputs, const PairInputs& wide_inputs) {
  const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
  const auto bytes = [&](const PairInputs& of) {
    return static_cast<double>(predicted_peak(of.model, of.plan, of.optimizer.kind, of.data->sequence())[activations]);
  };
  const double tokens = static_cast<double>(inputs.plan.batch.rows * inputs.data->sequence());
  const double statistics = 4 * tokens * (inputs.model.layers * (4.0 + inputs.model.heads) + 2);
  const double wide_bytes = bytes(wide_inputs);
  return (statistics + (wide_bytes - statistics) / 2) / wide_bytes;
}

// Bytes a parameter of parameters, gradients and optimizer state together.
double state_bytes_per_parameter(const PairInputs& inputs, const EngineRun& run) {
  return (peak(run, MemoryCategory::parameters) + peak(run, MemoryCategory::gradients) + peak(run, MemoryCategory::optimizer)) /
         static_cast<double>(num_parameters(inputs.model));
}

struct Ratio {
  const char* name;
  MemoryCategory category;
  double expected;
};

std::vector<Property> memory_properties(const PairInputs& inputs, const EngineRun& run, const EngineRun& wide_run,
                                        double gradient_share, double bytes_per_parameter, double activation_share) {
  const double slack = 64.0 / (2.0 * static_cast<double>(num_parameters(inputs.model)));  // blocks are rounded up to 64 bytes
  std::vector<Property> all;
  const auto near = [&](const std::string& name, double value, double expected, double tolerance, const std::string& why) {
    all.push_back({name, value, Relation::at_most, expected * (1 + tolerance), why, -1, ""});
    all.push_back({name + " (lower end)", value, Relation::at_least, expected * (1 - tolerance), why, -1, ""});
  };
  const auto share = [&](MemoryCategory category) { return peak(run, category) / peak(wide_run, category); };
  near("parameter_bytes_of_fp32", share(MemoryCategory::parameters), 0.5, 2 * slack, "two bytes instead of four");
  near("gradient_bytes_of_fp32", share(MemoryCategory::gradients), gradient_share, 2 * slack,
       "wide: four bytes; stored: those of the storage");
  near("optimizer_bytes_of_fp32", share(MemoryCategory::optimizer), 1.5, 2 * slack, "m and v, and the master copy beside them");
  near("state_bytes_per_parameter", state_bytes_per_parameter(inputs, run), bytes_per_parameter, 2 * slack,
       "stored 2, gradient 4 or 2, master 4, m 4, v 4");
  // 14 kept tensors a layer and four of the ends, each rounded up to 64 bytes, on both sides.
  const double tensors = 14.0 * inputs.model.layers + 4;
  near("activation_bytes_of_fp32", share(MemoryCategory::activations), activation_share,
       2 * 64 * tensors / peak(run, MemoryCategory::activations), "half, but for statistics, which stay fp32");
  return all;
}

// Two runs of the engine, of which only memory is compared.
Case memory_case(const std::string& name, const std::string& precision, const std::string& gradients) {
  const ParallelVariant variant{.rows = 16, .dropout = 0.0, .precision = precision, .gradients = gradients};
  Case result = loss_scaling_case("memory/" + name, "bytes at rest against fp32", Criterion::convergence, variant);
  result.execute = [variant](const RunContext& context) {
    ParallelVariant wide_variant = variant;
    wide_variant.precision = "fp32";
    wide_variant.gradients = "wide";
    PairInputs inputs = inputs_of(variant, context);
    PairInputs wide_inputs = inputs_of(wide_variant, context);
    inputs.steps = wide_inputs.steps = 2;
    const EngineRun wide_run = engine_run(wide_inputs, context, " beside it");
    EngineRun run = engine_run(inputs, context);
    CaseEvidence evidence;
    const bool stored = variant.gradients == "stored";
    evidence.properties = memory_properties(inputs, run, wide_run, stored ? 0.5 : 1.0, stored ? 16.0 : 18.0,
                                            expected_activation_share(inputs, wide_inputs));
    evidence.measured = std::move(run.measured);
    return evidence;
  };
  return result;
}

// ---- messages

Case message_case(const std::string& name, const ParallelVariant& variant, Purpose purpose) {
  Case result = loss_scaling_case("messages/" + name, "bytes on the wire against fp32", Criterion::convergence, variant);
  result.execute = [variant, purpose](const RunContext& context) {
    ParallelVariant wide_variant = variant;
    wide_variant.precision = "fp32";
    wide_variant.gradients = "wide";
    PairInputs inputs = inputs_of(variant, context);
    PairInputs wide_inputs = inputs_of(wide_variant, context);
    inputs.steps = wide_inputs.steps = 1;
    const EngineRun wide_run = engine_run(wide_inputs, context, " beside it");
    const EngineRun run = engine_run(inputs, context);
    // Each tensor rank sends three fp32 numbers a token to every other.
    const int tensor = inputs.plan.parallel.tensor;
    const double tokens = static_cast<double>(inputs.plan.batch.rows * inputs.data->sequence());
    const double statistics = purpose == Purpose::activation ? 12.0 * tokens * tensor * (tensor - 1) : 0;
    const auto all = static_cast<double>(bytes_sent(wide_run.measured, purpose));
    CaseEvidence evidence;
    evidence.properties = {
        sent_as_programmed(inputs, run.measured, purpose),
        {fmt::format("{}_bytes", tandem::name(purpose)), static_cast<double>(bytes_sent(run.measured, purpose)), Relation::equal,
         (all - statistics) / 2 + statistics,
         "half of fp32's, but for the statistics of the cross-entropy over tensor ranks, which stay fp32", -1, ""}};
    return evidence;
  };
  return result;
}

// ---- sums over micro-batches

// The gradient of step 0 from one micro-batch and from eleven, each a row: no row's numbers depend on the others, so that the two
// differ by sums in another order and what follows from the roundings that this flips.
double micro_batch_distance(const ParallelVariant& variant, const RunContext& context) {
  ParallelVariant one = variant;
  one.micro_batches = 1;
  const auto gradients = [&](const ParallelVariant& which) {
    const EngineRun run = engine_run(inputs_of(which, context), context);
    return *std::ranges::find(run.evidence.stages, kGradients, &StageEvidence::stage);
  };
  const StageEvidence expected = gradients(one);
  const StageEvidence found = gradients(variant);
  double distance = 0;
  double size = 0;
  for (std::size_t t = 0; t < expected.tensors.size(); ++t) {
    for (std::size_t i = 0; i < expected.tensors[t].values.size(); ++i) {
      distance += std::pow(found.tensors[t].values[i] - expected.tensors[t].values[i], 2);
      size += std::pow(expected.tensors[t].values[i], 2);
    }
  }
  return std::sqrt(distance / size);
}

Case micro_batch_sum_case(const std::string& precision) {
  ParallelVariant variant{.micro_batches = 11, .precision = precision, .sgd_step_only = true};
  Case result = loss_scaling_case("sums/micro_batches/" + precision, "eleven micro-batches add up in fp32",
                                  Criterion::convergence, variant);
  result.execute = [variant](const RunContext& context) {
    ParallelVariant stored = variant;
    stored.gradients = "stored";
    const double wide_distance = micro_batch_distance(variant, context);
    const double roundoff = candidate_roundoff(inputs_of(variant, context).plan);
    CaseEvidence evidence;
    evidence.properties = {
        {"distance_of_one_micro_batch", wide_distance, Relation::at_most, roundoff / 4,
         "sums in fp32; eleven roundings of a sum to 16 bits cost half a unit each, u sqrt(11 / 12) and more", 0, ""},
        {"distance_of_one_micro_batch, gradients=stored", micro_batch_distance(stored, context), Relation::at_least, roundoff / 2,
         "the same with sums that are rounded, as asked for: it shows", 0, ""}};
    return evidence;
  };
  return result;
}

void add_layouts(CaseList& cases, const std::string& label, const ParallelVariant& base) {
  const auto add = [&](const std::string& name, ParallelVariant variant) {
    variant.precision = base.precision;
    variant.gradients = base.gradients;
    cases.push_back(parallel_case(kSuite, fmt::format("{}/{}", name, label), variant, plain_benefits));
  };
  add("ranks1/accum3", {.micro_batches = 3});
  add("data3", {.degrees = {.data = 3}, .tied = false, .micro_batches = 2});
  add("tensor2/sequence", {.degrees = {.tensor = 2}, .sequence_parallel = true});
  add("pipeline2", {.degrees = {.pipeline = 2}, .micro_batches = 2});
  add("context2", {.degrees = {.context = 2}});
  add("data3/zero3", {.degrees = {.data = 3}, .micro_batches = 2, .zero_stage = 3});
  add("data2/tensor2/pipeline2", {.degrees = {.data = 2, .tensor = 2, .pipeline = 2}, .micro_batches = 2});
}

}  // namespace

void add_precision_cases(CaseList& cases) {
  for (const std::string precision : {"bf16", "fp16", "bf16-autocast", "fp16-autocast", "fp8"}) {
    add_layouts(cases, precision, {.precision = precision});
  }
  for (const std::string precision : {"bf16", "fp16"}) {
    add_layouts(cases, precision + "_stored", {.precision = precision, .gradients = "stored"});
  }
  for (const std::string precision : {"bf16", "fp16"}) {
    cases.push_back(parallel_case(kSuite, fmt::format("materialized/{}", precision),
                                  {.precision = precision, .attention = "materialized"}, plain_benefits));
    cases.push_back(parallel_case(kSuite, fmt::format("full_recompute/tensor2/{}", precision),
                                  {.degrees = {.tensor = 2}, .precision = precision, .recompute = {"full", 1}}, {}));
  }
  // Few tokens: every one of them must choose its experts by more than a 16-bit rounding.
  for (const std::string precision : {"bf16", "fp16"}) {
    cases.push_back(parallel_case(kSuite, fmt::format("data2/expert2/{}", precision),
                                  {.degrees = {.data = 2, .expert = 2},
                                   .experts = 4,
                                   .choices = 2,
                                   .micro_batches = 2,
                                   .rows = 5,
                                   .layers = 1,
                                   .row_tokens = 3,
                                   .precision = precision,
                                   .sgd_step_only = true},
                                  plain_benefits));
  }
  cases.push_back(micro_batch_sum_case("bf16"));
  cases.push_back(micro_batch_sum_case("fp16"));
  cases.push_back(memory_case("bf16", "bf16", "wide"));
  cases.push_back(memory_case("fp16", "fp16", "wide"));
  cases.push_back(memory_case("bf16_stored", "bf16", "stored"));
  cases.push_back(message_case("tensor2/bf16", {.degrees = {.tensor = 2}, .precision = "bf16"}, Purpose::activation));
  cases.push_back(
      message_case("pipeline2/fp16", {.degrees = {.pipeline = 2}, .micro_batches = 2, .precision = "fp16"}, Purpose::activation));
  cases.push_back(
      message_case("data2/bf16_stored", {.degrees = {.data = 2}, .precision = "bf16", .gradients = "stored"}, Purpose::gradient));
}

}  // namespace tandem
