// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "core/batch.h"
#include "core/dtype.h"
#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "reference/data_parallel.h"
#include "reference/fp8.h"
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
  /// Of `numerics`, what has 16 bits counts: fp32 and fp64 stand for Real. Real also is what master parameters, moments and, with
  /// wide gradients, sums over micro-batches and ranks are in.
  Numerics numerics = {};
  LossScaleConfig loss_scale = {};
  Fp8Config fp8 = {};
  bool materialized_attention = false;  ///< matters with 16-bit storage alone: probabilities are rounded
};

/// What a run leaves behind. Element s of the vectors belongs to step s; loss and norm are of the parameters before its update.
/// Gradients and norms are unscaled. Parameters are the master ones; what a model computes with is stored_parameters() of them.
template <class Real>
struct TrainingRecord {
  std::vector<double> losses;
  std::vector<double> gradient_norms;     ///< before clipping
  std::vector<double> clip_coefficients;  ///< 1 where nothing was clipped
  std::vector<double> learning_rates;
  std::vector<double> loss_scales;       ///< the scale that the step ran with
  std::vector<bool> skipped;             ///< overflowed: no update
  std::vector<std::int64_t> updates;     ///< made up to and with the step
  std::vector<double> auxiliary_losses;  ///< of models with experts, else 0; not part of `losses`
  std::vector<std::int64_t> kept_assignments;
  std::vector<std::int64_t> dropped_assignments;
  /// Of all steps (reference/routing.h): a run that computes less exactly may route otherwise once its error comes near it.
  double smallest_margin = std::numeric_limits<double>::infinity();
  NamedTensors<Real> gradients_step0;   ///< before clipping
  NamedTensors<Real> parameters_step1;  ///< after step 0
  NamedTensors<Real> parameters;        ///< after the last update
  OptimizerState<Real> optimizer;       ///< after the last update
  double loss_scale = 1.0;              ///< for the step after the last
  std::int64_t growth_tracker = 0;      ///< of a dynamic scaler, after the last step
  std::map<Fp8Tensor, Fp8History> fp8;  ///< after the last step; empty unless numerics.fp8
};

/// Runs `run.steps` steps. Starts from `initial` where given, else from initial_parameters(). Dropout is on where the model has
/// any, with the step's number in its key.
///
///   stored = round(parameters);   g = gradients of S * loss at stored, summed over ranks and micro-batches
///   overflow = an element of g is not finite;   g <- g / S;   norm of g, clip
///   update parameters and moments by g, at the learning rate of update number `updates`; with an overflow none of this
///   S follows from overflow or not (reference/loss_scaling.h)
///
/// So a skipped step uses its batch and its dropout masks up, and nothing else. Without loss scaling nothing is skipped.
template <class Real>
[[nodiscard]] TrainingRecord<Real> train(const TrainingRun& run, const std::optional<NamedTensors<Real>>& initial = {});

}  // namespace tandem::reference
