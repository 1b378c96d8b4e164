// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/optimizer_config.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/engine/rank_context.h"

namespace tandem {

/// Learning rate of step 0, 1, ... (formula at ScheduleConfig); total_steps stands in for decay_steps = 0.
[[nodiscard]] double scheduled_learning_rate(const OptimizerConfig& optimizer, const ScheduleConfig& schedule, std::int64_t step,
                                             std::int64_t total_steps);

/// Norm over all parameters (a tied wte once), in double. The gradients are those of the whole global batch, equal on all ranks.
[[nodiscard]] double gradient_norm(const RankContext& context, const ParameterStore& store);

/// min(1, max_grad_norm / (norm + 1e-6)); 1 where clipping is off.
[[nodiscard]] double clip_coefficient(const OptimizerConfig& config, double norm, const PitfallSet& pitfalls);

/// One update of every parameter. update_index counts from 1.
void update_parameters(const RankContext& context, const OptimizerConfig& config, double learning_rate, double gradient_scale,
                       std::int64_t update_index, ParameterStore& store);

}  // namespace tandem
