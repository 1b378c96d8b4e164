// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "core/plan.h"
#include "core/process_grid.h"
#include "optimized/hybrid_parallel/parameter_layout.h"

namespace tandem {

/// A contiguous range of the flat gradient buffer that is reduced as one.
struct GradientBucket {
  Interval elements;     ///< of the flat buffer
  Interval parameters;   ///< indices into the rank's local parameters
  bool experts = false;  ///< summed over the replicas of experts, not over those of dense parameters

  [[nodiscard]] GroupAxis axis() const noexcept { return experts ? GroupAxis::expert_gradient : GroupAxis::gradient; }
};

/// Parameters in backward order (last held first), a new bucket whenever the next tensor would exceed `bucket_bytes` or is of the
/// other kind (dense, experts); a larger tensor is a bucket of its own. 0: one bucket of each kind. Of each kind the first is
/// ready first.
[[nodiscard]] std::vector<GradientBucket> gradient_buckets(const std::vector<LocalParameter>& parameters,
                                                           std::int64_t bucket_bytes, std::int64_t element_bytes);

/// Units, in backward order: what ZeRO deals, gathers and frees as one, and what the gradient norm is summed by. The dense
/// parameters of one block, the experts of one block, each embedding table, the final norm, a separate head.
[[nodiscard]] std::vector<GradientBucket> parameter_units(const std::vector<LocalParameter>& parameters);

/// The buckets of a plan: units with ZeRO, else by size.
[[nodiscard]] std::vector<GradientBucket> buckets_of(const TrainingPlan& plan, const std::vector<LocalParameter>& parameters);

/// Sizes of the parts that `ranks` ranks keep of a unit.
[[nodiscard]] std::vector<std::int64_t> part_sizes(const GradientBucket& unit, int ranks);

}  // namespace tandem
