// SPDX-License-Identifier: Apache-2.0
#include "suites/parallel_cases.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/kept_training.h"
#include "suites/one_step.h"
#include "suites/repeated_rows.h"

namespace tandem {
namespace {

// A choice of experts whose probabilities differ by less than rounding can move is no test of anything. fp32 probabilities are
// right to about 1e-6 after a few steps; from 16-bit activations, to a rounding or so of a logit of size 1, of which a quarter
// reaches the probability.
constexpr double kSmallestMargin = 2e-5;
constexpr double kSmallestMarginOfRoundings = 4;
constexpr std::uint64_t kSeedsTried = 100;

double smallest_margin(const PairInputs& inputs) {
  reference::TrainingRun run = reference_run(inputs);
  run.steps = std::max<std::int64_t>(1, inputs.steps);
  return kept_training<double>(run)->smallest_margin;
}

void choose_seed(PairInputs& inputs) {
  const DType storage = inputs.plan.numerics.storage;
  const double smallest = is_16bit(storage) ? kSmallestMarginOfRoundings * unit_roundoff(storage) : kSmallestMargin;
  for (std::uint64_t i = 0; i < kSeedsTried; ++i) {
    if (smallest_margin(inputs) >= smallest) return;
    inputs.seed += 1000;
  }
  throw ContractError(fmt::format("no seed of {} keeps every choice of an expert {} away from a tie", kSeedsTried, smallest));
}

}  // namespace

GptConfig model_of(const ParallelVariant& variant) {
  GptConfig model;
  model.vocabulary = variant.vocabulary;
  model.sequence = 17;
  model.layers = variant.layers;
  model.hidden = variant.hidden;
  model.heads = variant.heads;
  model.mlp_hidden = variant.mlp_hidden;
  model.tied = variant.tied;
  model.experts = variant.experts;
  model.expert_choices = variant.choices;
  model.capacity_factor = 1.1;  // some tokens find no room
  model.auxiliary_loss_weight = 0.1;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = variant.dropout;
  return model;
}

TrainingPlan plan_of(const ParallelVariant& variant) {
  TrainingPlan plan;
  plan.parallel = variant.degrees;
  plan.pipeline = variant.pipeline;
  plan.sequence_parallel = variant.sequence_parallel;
  plan.rank_order = variant.rank_order;
  plan.recompute = variant.recompute;
  plan.precision = variant.precision;
  plan.numerics = numerics_from_precision(variant.precision);
  plan.gradients = variant.gradients;
  if (variant.gradients == "stored") plan.numerics.accumulate = plan.numerics.reduce = plan.numerics.storage;
  plan.attention = variant.attention;
  plan.zero_stage = variant.zero_stage;
  plan.offload = variant.offload;
  plan.loss_scale = variant.loss_scale;
  plan.batch = {variant.rows, variant.micro_batches};
  plan.buckets.bucket_bytes = variant.bucket_bytes;
  plan.overlap = variant.overlap;
  return plan;
}

PairInputs inputs_of(const ParallelVariant& variant, const RunContext& context) {
  PairInputs inputs;
  inputs.model = model_of(variant);
  inputs.plan = plan_of(variant);
  inputs.plan.threads_per_rank = context.threads_per_rank;
  inputs.optimizer.kind = variant.optimizer;
  inputs.optimizer.learning_rate = 3e-3;
  inputs.optimizer.epsilon = 1e-4;       // conditioning of the comparison: suites/data_parallel.cpp says why
  inputs.optimizer.max_grad_norm = 0.5;  // clipping is active
  inputs.schedule = {ScheduleKind::cosine, 2, 6, 0.1};
  inputs.steps = variant.sgd_step_only ? 0 : std::min(3, context.repetitions) + 1;
  inputs.seed = context.seed;
  inputs.initialization = variant.initialization;
  inputs.optimizer_frozen = context.pitfalls.on(Pitfall::both_sides_frozen);
  SyntheticOptions options{.vocabulary = inputs.model.vocabulary,
                           .sequence = variant.row_tokens,
                           .seed = context.seed,
                           .row_shape = variant.row_shape};
  options.branching = static_cast<int>(std::min<std::int64_t>(options.branching, options.vocabulary));
  inputs.data = std::make_shared<SyntheticCorpus>(options);
  if (context.pitfalls.on(Pitfall::same_batch_on_every_rank) && variant.degrees.data > 1) {
    inputs.plan.batch.rows = 3 * variant.degrees.data;
    inputs.model.embedding_dropout = inputs.model.attention_dropout = inputs.model.residual_dropout = 0.0;
    inputs.data = std::make_shared<RepeatedRows>(inputs.data, variant.degrees.data);
  }
  return inputs;
}

Case parallel_case(const std::string& suite, const std::string& name, const ParallelVariant& variant,
                   const PropertiesOf& properties, bool quick) {
  Case result;
  const PairInputs shown = inputs_of(variant, {});
  result.suite = suite;
  result.name = fmt::format("{}/{}", suite, name);
  result.summary = fmt::format(
      "{} rank(s), {}; {} layers, {} micro-batch(es), {} rows, {} head{}", shown.plan.parallel.world_size(),
      describe_layout(shown.plan), variant.layers, variant.micro_batches, variant.rows, variant.tied ? "tied" : "untied",
      variant.experts > 0 ? fmt::format(", {} experts, {} choice(s)", variant.experts, variant.choices) : "");
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::rounding;
  result.quick = quick;
  result.execute = [variant, properties](const RunContext& context) {
    PairInputs inputs = inputs_of(variant, context);
    if (variant.experts > 0) choose_seed(inputs);
    EngineRun run;
    CaseEvidence evidence = compare_with_reference(inputs, context, run);
    if (properties) evidence.properties = properties(inputs, run);
    evidence.properties.push_back(proven_program(inputs));
    return evidence;
  };
  result.localise = [variant](const RunContext& context) {
    PairInputs inputs = inputs_of(variant, context);
    if (variant.experts > 0) choose_seed(inputs);
    return localise(inputs, context);
  };
  return result;
}

Case twin_case(const std::string& suite, const std::string& name, const std::string& summary, const ParallelVariant& variant,
               const TwinOf& make_twin, const PropertiesOf& properties) {
  ParallelVariant twin = variant;
  make_twin(twin);
  Case result;
  const PairInputs shown = inputs_of(variant, {});
  result.suite = suite;
  result.name = fmt::format("{}/{}", suite, name);
  result.summary = fmt::format("{}, {}: {}", describe_layout(shown.plan), shown.plan.precision, summary);
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::bitwise;
  result.execute = [variant, twin, properties](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    CaseEvidence evidence;
    evidence.truth = engine_run(inputs_of(twin, context), context, " twin").evidence;
    EngineRun run = engine_run(inputs, context);
    if (properties) evidence.properties = properties(inputs, run);
    evidence.properties.push_back(proven_program(inputs));
    evidence.candidate = std::move(run.evidence);
    evidence.measured = std::move(run.measured);
    return evidence;
  };
  return result;
}

Property lockstep_agrees(const PairInputs& inputs, const LockstepGradients& lockstep) {
  const Batch batch = inputs.data->training_batch(0, inputs.plan.batch.rows);
  reference::TrainingRun run = reference_run(inputs);
  run.steps = 1;
  const auto truth = kept_training<double>(run)->gradients_step0;
  const auto found = lockstep(inputs, batch);
  double worst = 0;
  std::string worst_name;
  for (const auto& [name, values] : truth) {
    double difference = 0;
    double norm = 0;
    const auto& other = found.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      difference += (values[i] - other.at(i)) * (values[i] - other.at(i));
      norm += values[i] * values[i];
    }
    const double error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
    if (!(error <= worst)) std::tie(worst, worst_name) = std::pair(error, name);
    if (std::isnan(worst)) break;
  }
  return {"lockstep_reference_error",
          worst,
          Relation::at_most,
          1e-11,
          "fp64 rounding of sums in another order; the lockstep definition and the one-rank reference are one function",
          0,
          worst_name};
}

}  // namespace tandem
