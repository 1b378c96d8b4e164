// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {

double scheduled_learning_rate(const OptimizerConfig& optimizer, const ScheduleConfig& schedule, std::int64_t step,
                               std::int64_t total_steps) {
  if (step < schedule.warmup_steps) {
    return optimizer.learning_rate * static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.kind == ScheduleKind::constant) return optimizer.learning_rate;
  const std::int64_t decay_steps = schedule.decay_steps > 0 ? schedule.decay_steps : total_steps;
  const auto length = static_cast<double>(std::max<std::int64_t>(1, decay_steps - schedule.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - schedule.warmup_steps) / length);
  const double cosine = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  return optimizer.learning_rate * (schedule.min_ratio + (1.0 - schedule.min_ratio) * cosine);
}

double squared_gradient_norm(const RankContext& context, const ParameterStore& store) {
  // Replicated parameters must count once: every tensor rank has the same norms and row biases.
  const bool every_copy = context.pitfalls.on(Pitfall::replicated_counted_per_tensor_rank);
  const auto counts = [&](const LocalParameter& parameter) { return parameter.counts_in_norm || every_copy; };
  const bool all = std::all_of(store.parameters().begin(), store.parameters().end(), counts);
  if (all) return context.kernels->squared_norm(store.all_gradients());
  double sum = 0;
  for (std::size_t i = 0; i < store.size(); ++i) {
    if (counts(store.parameters()[i])) sum += context.kernels->squared_norm(store.gradient(i).flat());
  }
  return sum;
}

double clip_coefficient(const OptimizerConfig& config, double norm, const PitfallSet& pitfalls) {
  if (config.max_grad_norm == 0.0 || pitfalls.on(Pitfall::clipping_dropped)) return 1.0;
  // The epsilon is part of the definition: without it runs differ by up to 1e-6 / norm from those of other programs.
  const double epsilon = pitfalls.on(Pitfall::clip_without_epsilon) ? 0.0 : kClipEpsilon;
  const double coefficient = config.max_grad_norm / (norm + epsilon);
  return coefficient < 1.0 ? coefficient : std::isnan(coefficient) ? coefficient : 1.0;
}

void update_parameters(const RankContext& context, const OptimizerConfig& config, const ParameterUpdate& update,
                       ParameterStore& store) {
  for (std::size_t i = 0; i < store.size(); ++i) {
    const LocalParameter& held = store.parameters()[i];
    // Biases and norms do not decay: pulling a norm's weight towards zero fights what it is for.
    const bool decays = held.spec.decays() || context.pitfalls.on(Pitfall::decay_on_every_tensor);
    const double decay = decays ? config.weight_decay : 0.0;
    // One coefficient for all ranks: replicas that are clipped on one rank alone part.
    const bool unclipped =
        context.pitfalls.on(Pitfall::replicated_clipped_on_tensor_rank_zero) && update.tensor_rank > 0 && held.shard.is_whole();
    const double scale = unclipped ? 1.0 : update.gradient_scale;
    if (config.kind == OptimizerKind::sgd) {
      context.kernels->sgd(update.learning_rate, decay, scale, store.gradient(i).flat(), store.parameter(i).flat());
      continue;
    }
    const AdamWStep step = {update.learning_rate, config.beta1, config.beta2, config.epsilon, decay, update.index, scale};
    context.kernels->adamw(step, store.gradient(i).flat(), store.parameter(i).flat(), store.first_moment(i).flat(),
                           store.second_moment(i).flat());
  }
}

}  // namespace tandem
