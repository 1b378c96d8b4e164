// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "core/plan.h"

namespace tandem {

/// What the GPUs of a job reach in matrix products, measured on one of them.
struct GpuPeaks {
  double fp32_flops_per_second = 0, bf16_flops_per_second = 0;  ///< of one
  int gpus = 1;

  /// FLOP/s that the ranks of a plan can be held against: of bf16 where operands of its products have 16 bits or 8, of fp32 where
  /// they have 32; 0, no peak, of fp64. Ranks beyond the number of GPUs share them.
  [[nodiscard]] double of(const TrainingPlan& plan) const {
    const DType operands = plan.numerics.compute;
    if (operands == DType::f64) return 0;
    return std::min(plan.parallel.world_size(), gpus) * (operands == DType::f32 ? fp32_flops_per_second : bf16_flops_per_second);
  }
};

}  // namespace tandem
