// SPDX-License-Identifier: Apache-2.0
#include "reference/training.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace tandem::reference {

template <class Real>
TrainingRecord<Real> train(const TrainingRun& run, const std::optional<NamedTensors<Real>>& initial) {
  TANDEM_CHECK(run.batch != nullptr, "a training run needs batches");
  validate(run.model);
  TrainingRecord<Real> record;
  record.parameters = initial ? *initial : initial_parameters<Real>(run.model, run.initialization, run.seed);
  record.optimizer = initial_optimizer_state<Real>(run.model);
  for (std::int64_t step = 0; step < run.steps; ++step) {
    const Batch batch = run.batch(step);
    const DropoutStep dropout{run.seed, static_cast<std::uint32_t>(step)};
    RankGradients<Real> reduced = data_parallel_gradients<Real>(run.model, record.parameters, batch, run.layout, dropout);
    if (step == 0) record.gradients_step0 = reduced.gradients;

    const double norm = global_norm(reduced.gradients);
    const double coefficient = clip_coefficient(norm, run.optimizer.max_grad_norm);
    scale(reduced.gradients, coefficient);
    const double rate = learning_rate(run.optimizer, run.schedule, step, run.steps);
    optimizer_step(run.model, run.optimizer, rate, reduced.gradients, record.parameters, record.optimizer);
    if (step == 0) record.parameters_step1 = record.parameters;

    record.losses.push_back(reduced.loss);
    record.gradient_norms.push_back(norm);
    record.clip_coefficients.push_back(coefficient);
    record.learning_rates.push_back(rate);
    record.auxiliary_losses.push_back(reduced.auxiliary_loss());
    record.kept_assignments.push_back(reduced.routing.kept_assignments);
    record.dropped_assignments.push_back(reduced.routing.dropped_assignments);
    record.smallest_margin = std::min(record.smallest_margin, reduced.routing.smallest_margin);
  }
  return record;
}

template TrainingRecord<float> train(const TrainingRun&, const std::optional<NamedTensors<float>>&);
template TrainingRecord<double> train(const TrainingRun&, const std::optional<NamedTensors<double>>&);

}  // namespace tandem::reference
