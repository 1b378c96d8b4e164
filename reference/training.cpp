// SPDX-License-Identifier: Apache-2.0
#include "reference/training.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "reference/loss_scaling.h"
#include "reference/mixed_precision.h"

namespace tandem::reference {
namespace {

template <class Real>
void record_gradients(const RankGradients<Real>& reduced, TrainingRecord<Real>& record) {
  record.losses.push_back(reduced.loss);
  record.auxiliary_losses.push_back(reduced.auxiliary_loss());
  record.kept_assignments.push_back(reduced.routing.kept_assignments);
  record.dropped_assignments.push_back(reduced.routing.dropped_assignments);
  record.smallest_margin = std::min(record.smallest_margin, reduced.routing.smallest_margin);
}

/// From unscaled gradients to the next parameters, unless the step is skipped.
template <class Real>
void finish_step(const TrainingRun& run, NamedTensors<Real>& gradients, bool skip, TrainingRecord<Real>& record) {
  const double norm = global_norm(gradients);
  const double coefficient = clip_coefficient(norm, run.optimizer.max_grad_norm);
  const double rate = learning_rate(run.optimizer, run.schedule, record.optimizer.updates, run.steps);
  if (!skip) {
    scale(gradients, coefficient);
    optimizer_step(run.model, run.optimizer, rate, gradients, record.parameters, record.optimizer);
    round_all(run.numerics.master, record.parameters);
  }
  record.gradient_norms.push_back(norm);
  record.clip_coefficients.push_back(coefficient);
  record.learning_rates.push_back(rate);
  record.skipped.push_back(skip);
  record.updates.push_back(record.optimizer.updates);
}

}  // namespace

template <class Real>
TrainingRecord<Real> train(const TrainingRun& run, const std::optional<NamedTensors<Real>>& initial) {
  TANDEM_CHECK(run.batch != nullptr, "a training run needs batches");
  validate(run.model);
  TrainingRecord<Real> record;
  record.parameters = initial ? *initial : initial_parameters<Real>(run.model, run.initialization, run.seed);
  record.optimizer = initial_optimizer_state<Real>(run.model);
  LossScaler scaler(run.loss_scale, run.numerics);
  Fp8Scaling fp8(run.fp8);
  StepNumerics numerics{rounding_of(run.numerics, &fp8), 1.0, run.numerics.accumulate, run.numerics.reduce};
  numerics.rounding.probabilities = run.materialized_attention;
  for (std::int64_t step = 0; step < run.steps; ++step) {
    const DropoutStep dropout{run.seed, static_cast<std::uint32_t>(step)};
    numerics.loss_scale = scaler.scale();
    RankGradients<Real> reduced = data_parallel_gradients<Real>(run.model, stored_parameters(run.numerics, record.parameters),
                                                                run.batch(step), run.layout, dropout, numerics);
    const bool overflowed = !all_finite(reduced.gradients);
    unscale(reduced.gradients, numerics.loss_scale);
    if (step == 0) record.gradients_step0 = reduced.gradients;

    const bool update = scaler.finish_step(overflowed);
    finish_step(run, reduced.gradients, !update, record);
    if (step == 0) record.parameters_step1 = record.parameters;
    fp8.finish_step();
    record.loss_scales.push_back(numerics.loss_scale);
    record_gradients(reduced, record);
  }
  record.loss_scale = scaler.scale();
  record.growth_tracker = scaler.growth_tracker();
  record.fp8 = fp8.state();
  return record;
}

template TrainingRecord<float> train(const TrainingRun&, const std::optional<NamedTensors<float>>&);
template TrainingRecord<double> train(const TrainingRun&, const std::optional<NamedTensors<double>>&);

}  // namespace tandem::reference
