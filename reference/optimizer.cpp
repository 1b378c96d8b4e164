// SPDX-License-Identifier: Apache-2.0
#include "reference/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "reference/require.h"

namespace tandem::reference {
namespace {

double schedule_factor(const ScheduleConfig& schedule, std::int64_t step, std::int64_t total_steps) {
  if (step < schedule.warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps);
  if (schedule.kind == ScheduleKind::constant) return 1.0;
  const std::int64_t decay_steps = schedule.decay_steps > 0 ? schedule.decay_steps : total_steps;
  const std::int64_t length = decay_steps - schedule.warmup_steps;
  // A decay that ends before the warm-up does has no slope: its end is reached at once.
  const double x =
      length <= 0 ? 1.0 : std::min(1.0, static_cast<double>(step - schedule.warmup_steps) / static_cast<double>(length));
  return schedule.min_ratio + (1.0 - schedule.min_ratio) * (1.0 + std::cos(std::numbers::pi * x)) / 2.0;
}

/// p <- p (1 - lr wd).
template <class Real>
void decay(const OptimizerConfig& config, const UpdateStep& step, std::span<Real> parameter) {
  if (!step.decays) return;
  const auto factor = static_cast<Real>(1.0 - step.learning_rate * config.weight_decay);
  for (Real& p : parameter) p *= factor;
}

}  // namespace

double learning_rate(const OptimizerConfig& optimizer, const ScheduleConfig& schedule, std::int64_t step,
                     std::int64_t total_steps) {
  return optimizer.learning_rate * schedule_factor(schedule, step, total_steps);
}

template <class Real>
double global_norm(const NamedTensors<Real>& gradients) {
  double sum = 0.0;
  for (const auto& [name, values] : gradients) {
    for (const Real value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  }
  return std::sqrt(sum);
}

double clip_coefficient(double norm, double max_grad_norm) {
  if (max_grad_norm == 0.0) return 1.0;
  const double coefficient = max_grad_norm / (norm + kClipEpsilon);
  // Not std::min: a norm that is NaN must stay visible.
  return coefficient > 1.0 ? 1.0 : coefficient;
}

template <class Real>
void scale(NamedTensors<Real>& gradients, double coefficient) {
  for (auto& [name, values] : gradients) {
    for (Real& value : values) value *= static_cast<Real>(coefficient);
  }
}

template <class Real>
void adamw_update(const OptimizerConfig& config, const UpdateStep& step, std::span<Real> parameter,
                  std::span<const Real> gradient, std::span<Real> m, std::span<Real> v) {
  const auto count = static_cast<std::int64_t>(parameter.size());
  require_size(gradient, count, "gradient");
  require_size(m, count, "m");
  require_size(v, count, "v");
  const auto n = static_cast<double>(step.number);
  const auto beta1 = static_cast<Real>(config.beta1);
  const auto beta2 = static_cast<Real>(config.beta2);
  const auto rest1 = static_cast<Real>(1.0 - config.beta1);
  const auto rest2 = static_cast<Real>(1.0 - config.beta2);
  const auto correction1 = static_cast<Real>(1.0 - std::pow(config.beta1, n));
  const auto correction2 = static_cast<Real>(1.0 - std::pow(config.beta2, n));
  const auto epsilon = static_cast<Real>(config.epsilon);
  const auto rate = static_cast<Real>(step.learning_rate);
  decay(config, step, parameter);
  for (std::size_t i = 0; i < parameter.size(); ++i) {
    const Real g = gradient[i];
    m[i] = beta1 * m[i] + rest1 * g;
    v[i] = beta2 * v[i] + rest2 * g * g;
    parameter[i] -= rate * (m[i] / correction1) / (std::sqrt(v[i] / correction2) + epsilon);
  }
}

template <class Real>
void sgd_update(const OptimizerConfig& config, const UpdateStep& step, std::span<Real> parameter,
                std::span<const Real> gradient) {
  require_size(gradient, static_cast<std::int64_t>(parameter.size()), "gradient");
  decay(config, step, parameter);
  const auto rate = static_cast<Real>(step.learning_rate);
  for (std::size_t i = 0; i < parameter.size(); ++i) parameter[i] -= rate * gradient[i];
}

template <class Real>
OptimizerState<Real> initial_optimizer_state(const GptConfig& model) {
  return {zero_tensors<Real>(model), zero_tensors<Real>(model), 0};
}

template <class Real>
void optimizer_step(const GptConfig& model, const OptimizerConfig& config, double learning_rate,
                    const NamedTensors<Real>& gradients, NamedTensors<Real>& parameters, OptimizerState<Real>& state) {
  ++state.updates;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const std::string& name = parameter.name;
    const UpdateStep step{state.updates, learning_rate, parameter.decays()};
    if (config.kind == OptimizerKind::adamw) {
      adamw_update<Real>(config, step, tensor(parameters, name), tensor(gradients, name), tensor(state.m, name),
                         tensor(state.v, name));
    } else {
      sgd_update<Real>(config, step, tensor(parameters, name), tensor(gradients, name));
    }
  }
}

template double global_norm(const NamedTensors<float>&);
template double global_norm(const NamedTensors<double>&);
template void scale(NamedTensors<float>&, double);
template void scale(NamedTensors<double>&, double);
template void adamw_update(const OptimizerConfig&, const UpdateStep&, std::span<float>, std::span<const float>, std::span<float>,
                           std::span<float>);
template void adamw_update(const OptimizerConfig&, const UpdateStep&, std::span<double>, std::span<const double>,
                           std::span<double>, std::span<double>);
template void sgd_update(const OptimizerConfig&, const UpdateStep&, std::span<float>, std::span<const float>);
template void sgd_update(const OptimizerConfig&, const UpdateStep&, std::span<double>, std::span<const double>);
template OptimizerState<float> initial_optimizer_state(const GptConfig&);
template OptimizerState<double> initial_optimizer_state(const GptConfig&);
template void optimizer_step(const GptConfig&, const OptimizerConfig&, double, const NamedTensors<float>&, NamedTensors<float>&,
                             OptimizerState<float>&);
template void optimizer_step(const GptConfig&, const OptimizerConfig&, double, const NamedTensors<double>&, NamedTensors<double>&,
                             OptimizerState<double>&);

}  // namespace tandem::reference
