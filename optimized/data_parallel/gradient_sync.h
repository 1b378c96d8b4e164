// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/plan.h"
#include "optimized/comm/communicator.h"
#include "optimized/data_parallel/buckets.h"
#include "optimized/rank_context.h"

namespace tandem {

/// values <- mean over the ranks of values, exchanged as fp16 in both directions and summed in fp32 in rank order:
///   wire_r = fp16(values_r);  values = fp32(fp16(sum_r fp32(wire_r) / ranks))
/// Each rank sums one part (all_to_all), and the means go back (all_gather): 2 b (n - 1) / n bytes a rank, b = 2 per element. The
/// sum never is a half-precision number, so it cannot overflow where no rank's value did, and nothing is divided before it is
/// summed. values: fp32, the same size on all ranks.
void all_reduce_mean_f16(const RankContext& context, Communicator& ranks, TensorView values, const CommOptions& options);

/// Sums gradients over the replicas of the parameters, bucket by bucket. Each rank's gradient is already divided by the valid
/// tokens of the *whole* global batch, so the sum needs no factor.
class GradientSync {
 public:
  /// Borrows what the context points to.
  GradientSync(const RankContext& context, const Numerics& numerics) : context_(context), numerics_(numerics) {}

  /// gradients: this bucket's range of the flat gradient buffer; `replicas` the ranks that hold the same parameters. It is
  /// reduced when the Work is complete. fp32 gradients that travel as fp16 are reduced before this returns.
  [[nodiscard]] Work start(Communicator& replicas, TensorView gradients, int bucket_index, Progress progress);

 private:
  RankContext context_;
  Numerics numerics_;
};

}  // namespace tandem
