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

/// Sum of squares, in double, over what counts on this rank: of the copies of a parameter that the ranks of one model replica
/// hold (replicated over tensor ranks, tied over the ends of the pipeline, dense over expert ranks) one counts.
[[nodiscard]] double squared_gradient_norm(const RankContext& context, const ParameterStore& store);

/// min(1, max_grad_norm / (norm + 1e-6)); 1 where clipping is off.
[[nodiscard]] double clip_coefficient(const OptimizerConfig& config, double norm, const PitfallSet& pitfalls);

struct ParameterUpdate {
  double learning_rate = 0;
  double gradient_scale = 1;  ///< the clip coefficient
  std::int64_t index = 1;     ///< counts from 1
  int tensor_rank = 0;
};

/// One update of every parameter that this rank holds.
void update_parameters(const RankContext& context, const OptimizerConfig& config, const ParameterUpdate& update,
                       ParameterStore& store);

}  // namespace tandem
