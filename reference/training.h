// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "core/batch.h"
#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "reference/data_parallel.h"
#include "reference/optimizer.h"
#include "reference/tensors.h"

namespace tandem::reference {

/// Everything that determines a run of the plain training loop.
struct TrainingRun {
  GptConfig model;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  DataParallelLayout layout;
  std::int64_t steps = 1;
  std::uint64_t seed = 1;  ///< of the initial parameters and of the dropout masks
  Initialization initialization = Initialization::gpt2;
  std::function<Batch(std::int64_t step)> batch;  ///< the global batch of step 0, 1, ...
};

/// What a run leaves behind. Element s of the vectors belongs to step s; loss and norm are of the parameters before its update.
template <class Real>
struct TrainingRecord {
  std::vector<double> losses;
  std::vector<double> gradient_norms;     ///< before clipping
  std::vector<double> clip_coefficients;  ///< 1 where nothing was clipped
  std::vector<double> learning_rates;
  std::vector<double> auxiliary_losses;  ///< of models with experts, else 0; not part of `losses`
  std::vector<std::int64_t> kept_assignments;
  std::vector<std::int64_t> dropped_assignments;
  /// Of all steps (reference/routing.h): a run that computes less exactly may route otherwise once its error comes near it.
  double smallest_margin = std::numeric_limits<double>::infinity();
  NamedTensors<Real> gradients_step0;   ///< before clipping
  NamedTensors<Real> parameters_step1;  ///< after the first update
  NamedTensors<Real> parameters;        ///< after the last update
  OptimizerState<Real> optimizer;       ///< after the last update
};

/// Runs `run.steps` steps: gradients of the global batch, norm, clip, update. Starts from `initial` where given, else from
/// initial_parameters(). Dropout is on where the model has any, with the step's number in its key.
template <class Real>
[[nodiscard]] TrainingRecord<Real> train(const TrainingRun& run, const std::optional<NamedTensors<Real>>& initial = {});

}  // namespace tandem::reference
