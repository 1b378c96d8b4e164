// SPDX-License-Identifier: Apache-2.0
#include "suites/pair.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "core/rng.h"
#include "harness/equivalence.h"
#include "reference/training.h"
#include "suites/evidence_stage.h"
#include "suites/expected_yardstick.h"
#include "suites/kept_training.h"
#include "suites/one_step.h"
#include "suites/trace.h"

namespace tandem {
namespace {

template <class Real>
std::vector<StageTensor> tensors_of(const GptConfig& model, const reference::NamedTensors<Real>& named) {
  std::vector<StageTensor> tensors;
  for (const ParameterSpec& spec : gpt_parameters(model)) {
    const std::vector<Real>& values = named.at(spec.name);
    tensors.push_back({spec.name, {values.begin(), values.end()}});
  }
  return tensors;
}

}  // namespace

OptimizerConfig plain_sgd(const PairInputs& inputs) {
  OptimizerConfig sgd;
  sgd.kind = OptimizerKind::sgd;
  sgd.learning_rate = inputs.optimizer_frozen ? 0.0 : inputs.sgd_learning_rate;
  sgd.weight_decay = 0.0;
  sgd.max_grad_norm = 0.0;
  return sgd;
}

OptimizerConfig own_optimizer(const PairInputs& inputs) {
  OptimizerConfig config = inputs.optimizer;
  if (inputs.optimizer_frozen) config.learning_rate = 0.0;
  return config;
}

reference::TrainingRun reference_run(const PairInputs& inputs) {
  reference::TrainingRun run;
  run.model = inputs.model;
  run.seed = inputs.seed;
  run.initialization = inputs.initialization;
  run.optimizer = own_optimizer(inputs);
  run.schedule = inputs.schedule;
  run.steps = inputs.steps;
  run.batch = [&inputs](std::int64_t step) { return inputs.data->training_batch(step, inputs.plan.batch.rows); };
  return run;
}

namespace {

// The reference in the candidate's precision. What is not 16 bits wide is Real in either.
void in_precision_of(const TrainingPlan& plan, reference::TrainingRun& run) {
  run.numerics = plan.numerics;
  run.loss_scale = plan.loss_scale;
  run.fp8 = plan.fp8;
  run.materialized_attention = plan.attention == "materialized";
}

// Of what numbers are stored in, or of the operands of products.
double precision_roundoff(const Numerics& numerics) {
  if (numerics.fp8) return 0x1p-4;
  return unit_roundoff(numerics.autocast() ? numerics.compute : numerics.storage);
}

// Numbers of fp32, so that a narrow reference starts from the same ones.
reference::NamedTensors<double> initial_of(const PairInputs& inputs) {
  auto initial = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  if (inputs.neighbour == 0) return initial;
  const double unit = 2 * std::max(precision_roundoff(inputs.plan.numerics), double{unit_roundoff(DType::f32)});
  CounterRng signs(inputs.seed, fmt::format("neighbour {}", inputs.neighbour));
  for (auto& [name, values] : initial) {
    for (double& value : values) value = static_cast<float>(value * (signs.next_below(2) == 0 ? 1 - unit : 1 + unit));
  }
  return initial;
}

}  // namespace

double candidate_roundoff(const TrainingPlan& plan) { return precision_roundoff(plan.numerics); }

// In fp32, in which double's reference for rounding runs as well, they are right to about 1e-6 after a few steps; from 16-bit
// activations to a rounding or so of a logit of size 1, of which a quarter reaches the probability.
double decided_margin(const TrainingPlan& plan) {
  const double roundoff = candidate_roundoff(plan);
  return roundoff < 0x1p-20 ? 2e-5 : 4 * roundoff;
}

RunConfig run_config_of(const PairInputs& inputs) {
  RunConfig config;
  config.model = inputs.model;
  config.plan = inputs.plan;
  config.optimizer = inputs.optimizer;
  config.schedule = inputs.schedule;
  config.steps = inputs.steps;
  config.seed = inputs.seed;
  config.initialization = inputs.initialization;
  return config;
}

template <class Real>
Evidence reference_evidence(const PairInputs& inputs, int ranks, int micro_batches, ReferenceDecisions* decisions) {
  const bool as_candidate = std::is_same_v<Real, float> && inputs.plan.numerics.storage != DType::f64;
  reference::TrainingRun run = reference_run(inputs);
  run.layout = {ranks, micro_batches};
  if (as_candidate) in_precision_of(inputs.plan, run);
  run.optimizer = plain_sgd(inputs);
  run.schedule = {};
  run.steps = 1;
  const auto initial = reference::converted<Real>(initial_of(inputs));
  const auto sgd_record = kept_training<Real>(run, initial);
  const reference::TrainingRecord<Real>& sgd = *sgd_record;
  if (decisions != nullptr) *decisions = {sgd.smallest_margin, std::ranges::count(sgd.skipped, true)};

  Evidence evidence;
  const std::string precision = as_candidate ? inputs.plan.precision : fmt::format("fp{}", sizeof(Real) * 8);
  evidence.side = fmt::format("reference {} ranks {} micro-batches {}", precision, ranks, micro_batches);
  evidence.unit_roundoff = as_candidate ? precision_roundoff(inputs.plan.numerics) : std::numeric_limits<Real>::epsilon() / 2;
  evidence.stages = {make_stage(inputs, kInitialParameters, 0, tensors_of(inputs.model, initial)),
                     make_stage(inputs, kGradients, 0, tensors_of(inputs.model, sgd.gradients_step0)),
                     make_stage(inputs, "gradient_norm", 0, {{"gradient_norm", {sgd.gradient_norms.front()}}}),
                     make_stage(inputs, "sgd_parameters", 0, tensors_of(inputs.model, sgd.parameters))};
  evidence.losses = sgd.losses;
  if (inputs.steps == 0) return evidence;
  run.optimizer = own_optimizer(inputs);
  run.schedule = inputs.schedule;
  run.steps = inputs.steps;
  const auto own_record = kept_training<Real>(run, initial);
  const reference::TrainingRecord<Real>& own = *own_record;
  if (decisions != nullptr) {
    decisions->smallest_margin = std::min(decisions->smallest_margin, own.smallest_margin);
    decisions->skipped_steps += std::ranges::count(own.skipped, true);
  }
  const auto last = static_cast<int>(inputs.steps) - 1;
  evidence.stages.push_back(make_stage(inputs, "adamw_parameters", last, tensors_of(inputs.model, own.parameters)));
  evidence.stages.push_back(make_stage(inputs, kLosses, last, {{"loss", own.losses}}));
  evidence.stages.push_back(make_stage(inputs, kGradientNorms, last, {{"gradient_norm", own.gradient_norms}}));
  evidence.losses = own.losses;
  return evidence;
}

template Evidence reference_evidence<float>(const PairInputs&, int, int, ReferenceDecisions*);
template Evidence reference_evidence<double>(const PairInputs&, int, int, ReferenceDecisions*);

namespace {

// So far beyond its bound a tensor is wrong, whatever chance had to do with the bound.
constexpr double kNoChance = 10;

double worst_over_bound(const CaseEvidence& evidence) {
  double worst = 0;
  for (const TensorVerdict& tensor : judge(Criterion::rounding, evidence, {}).tensors)
    worst = std::max(worst, error_over_bound(tensor));
  return worst;
}

}  // namespace

CaseEvidence compare_with_reference(const PairInputs& inputs, const RunContext& context, EngineRun& run) {
  CaseEvidence evidence;
  evidence.truth = reference_evidence<double>(inputs, 1, 1);
  evidence.yardstick = reference_evidence<float>(inputs, inputs.plan.parallel.data, inputs.plan.batch.micro_batches);
  run = engine_run(inputs, context);
  evidence.candidate = run.evidence;
  if (inputs.steps > 0) evidence.measured = run.measured;
  if (inputs.plan.numerics.storage == DType::f64) return evidence;
  const double worst = worst_over_bound(evidence);
  if (worst > 1 && worst < kNoChance) evidence.yardstick = expected_yardstick(inputs, *evidence.truth);
  return evidence;
}

CaseEvidence compare_with_reference(const PairInputs& inputs, const RunContext& context) {
  EngineRun run;
  return compare_with_reference(inputs, context, run);
}

std::optional<Localisation> localise(const PairInputs& inputs, const RunContext& context) {
  const Numerics& numerics = inputs.plan.numerics;
  if (numerics.fp8) return std::nullopt;  // every quantised product is beyond the bounds of what bf16 rounds
  // With autocast a product is as exact as its operands.
  const DType precision = numerics.autocast() ? numerics.compute : numerics.storage;
  TracedStep step;
  step.model = inputs.model;
  step.parameters = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  step.batch = inputs.data->training_batch(0, inputs.plan.batch.rows);
  if (inputs.model.has_dropout()) step.dropout = reference::DropoutStep{inputs.seed, 0};
  const auto truth = record_reference(step, ReferenceSide::truth);
  const auto yardstick = record_reference(step, ReferenceSide::yardstick, precision);
  TraceHeader header = reference_header(step, ReferenceSide::yardstick, precision);
  header.framework = "tandem engine";
  header.ranks = inputs.plan.parallel.world_size();
  TraceRecorder recorded(header);
  trace_one_step(inputs, context, recorded);
  const TraceBounds bounds = trace_bounds(header, inputs.plan.batch.rows * inputs.data->sequence());
  const TraceComparison comparison =
      compare_traces({&recorded, truth.get(), yardstick.get(), truth.get()}, bounds, Completeness::any_subset);
  const std::optional<Divergence> first = comparison.first_divergence();
  if (!first) return std::nullopt;
  return Localisation{first->name,  first->layer,       first->operation, first->phase, first->rank,
                      first->slice, first->micro_batch, first->error,     first->bound, first->error_over_bound};
}

std::string describe_layout(const TrainingPlan& plan) {
  std::string text;
  const auto axis = [&](std::string_view name, int degree) {
    if (degree > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " ", name, degree);
  };
  axis("data", plan.parallel.data);
  axis("tensor", plan.parallel.tensor);
  if (plan.sequence_parallel) text += " sequence-parallel";
  axis("pipeline", plan.parallel.pipeline);
  if (plan.parallel.pipeline > 1) text += fmt::format(" {}", plan.pipeline.effective_schedule());
  axis("chunks", plan.pipeline.chunks);
  axis("context", plan.parallel.context);
  axis("expert", plan.parallel.expert);
  const auto option = [&](std::string_view name, std::string_view value) {
    text += fmt::format("{}{} {}", text.empty() ? "" : " ", name, value);
  };
  if (plan.zero_stage > 0) option("zero", std::to_string(plan.zero_stage));
  if (plan.offload != "none") option("offload", plan.offload);
  if (plan.recompute.mode != "none") option("recompute", plan.recompute.mode);
  if (plan.attention != "blocked") option("attention", plan.attention);
  return text.empty() ? "data 1" : text;
}

}  // namespace tandem
