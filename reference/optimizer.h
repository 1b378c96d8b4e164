// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "reference/tensors.h"

/// Equations in core/optimizer_config.h. Factors that are the same for all elements (learning rate, bias corrections, clip
/// coefficient) are computed in double and rounded once to Real; the update of an element is arithmetic in Real.
namespace tandem::reference {

/// Learning rate of step s = 0, 1, ... of a run of `total_steps`.
[[nodiscard]] double learning_rate(const OptimizerConfig& optimizer, const ScheduleConfig& schedule, std::int64_t step,
                                   std::int64_t total_steps);

/// L2 norm over all elements of all tensors. Squares are summed in double for every Real: a float sum of millions of squares
/// would measure its own order, not the gradient.
template <class Real>
[[nodiscard]] double global_norm(const NamedTensors<Real>& gradients);

/// min(1, max_grad_norm / (norm + kClipEpsilon)); 1 where max_grad_norm is 0.
[[nodiscard]] double clip_coefficient(double norm, double max_grad_norm);

/// g <- coefficient g.
template <class Real>
void scale(NamedTensors<Real>& gradients, double coefficient);

/// What distinguishes one update from the next.
struct UpdateStep {
  std::int64_t number = 1;     ///< n = 1, 2, ...: counts updates, for the bias correction
  double learning_rate = 0.0;  ///< of this step
  bool decays = false;         ///< weight decay applies to this tensor
};

/// One AdamW update of one tensor; all spans of the same length.
template <class Real>
void adamw_update(const OptimizerConfig& config, const UpdateStep& step, std::span<Real> parameter,
                  std::span<const Real> gradient, std::span<Real> m, std::span<Real> v);

/// One SGD update of one tensor.
template <class Real>
void sgd_update(const OptimizerConfig& config, const UpdateStep& step, std::span<Real> parameter, std::span<const Real> gradient);

/// Moments of every parameter (unused by SGD) and the number of updates made.
template <class Real>
struct OptimizerState {
  NamedTensors<Real> m;
  NamedTensors<Real> v;
  std::int64_t updates = 0;
};
template <class Real>
[[nodiscard]] OptimizerState<Real> initial_optimizer_state(const GptConfig& model);

/// Updates all parameters of `model` with gradients that are already clipped, by the configured kind; counts the update.
template <class Real>
void optimizer_step(const GptConfig& model, const OptimizerConfig& config, double learning_rate,
                    const NamedTensors<Real>& gradients, NamedTensors<Real>& parameters, OptimizerState<Real>& state);

}  // namespace tandem::reference
