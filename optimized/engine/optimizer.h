// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/optimizer_config.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/hybrid_parallel/process_groups.h"
#include "optimized/rank_context.h"

namespace tandem {

/// Learning rate at position 0, 1, ... of the schedule (formula at ScheduleConfig); total_steps stands in for decay_steps = 0.
/// The position counts updates: a step that was skipped does not move it.
[[nodiscard]] double scheduled_learning_rate(const OptimizerConfig& optimizer, const ScheduleConfig& schedule,
                                             std::int64_t position, std::int64_t total_steps);

/// Sums of squares of the gradient in double, one for each part of each unit that the ranks of its group would keep under ZeRO,
/// whether they do or not: sharded and unsharded runs add up the same numbers in the same order. 0 for parts that other ranks
/// keep. Of the copies of a parameter that the ranks of one model replica hold (replicated over tensor ranks, tied over the ends
/// of the pipeline, dense over expert ranks) one counts.
struct NormPartials {
  std::vector<double> dense, experts;
  double uncounted = 0;  ///< of copies that do not count here, for finite()
  /// What this rank adds to the sum over the model's ranks. The ranks of an expert group have the same dense sums: the first
  /// speaks for all.
  [[nodiscard]] double share(int expert_rank) const;
  /// Whether every gradient that this rank keeps is finite.
  [[nodiscard]] bool finite() const { return std::isfinite(share(0) + uncounted); }
};
[[nodiscard]] NormPartials norm_partials(const RankContext& context, const ProcessGroups& groups, const ParameterStore& store);
/// Entries of norm_partials().
struct NormPartialCounts {
  std::int64_t dense = 0, experts = 0;
};
[[nodiscard]] NormPartialCounts norm_partial_counts(const std::vector<LocalParameter>& parameters, int gradient_ranks,
                                                    int expert_gradient_ranks);

/// min(1, max_grad_norm / (norm + 1e-6)); 1 where clipping is off.
[[nodiscard]] double clip_coefficient(const OptimizerConfig& config, double norm, const PitfallSet& pitfalls);

struct ParameterUpdate {
  double learning_rate = 0;
  double gradient_scale = 1;  ///< clip coefficient / loss scale
  std::int64_t index = 1;     ///< counts from 1
  int tensor_rank = 0;
  int step = -1;  ///< for the timeline
};

/// One update of every part that this rank keeps: master copies, moments, and stored values from them.
void update_parameters(const RankContext& context, const OptimizerConfig& config, const ParameterUpdate& update,
                       ParameterStore& store);

}  // namespace tandem
