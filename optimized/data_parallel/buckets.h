// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "optimized/hybrid_parallel/parameter_layout.h"

namespace tandem {

/// A contiguous range of the flat gradient buffer that is reduced as one.
struct GradientBucket {
  Interval elements;     ///< of the flat buffer
  Interval parameters;   ///< indices into the rank's local parameters
  bool experts = false;  ///< summed over the replicas of experts, not over those of dense parameters
};

/// Parameters in backward order (last held first), a new bucket whenever the next tensor would exceed `bucket_bytes` or is of the
/// other kind (dense, experts); a larger tensor is a bucket of its own. 0: one bucket of each kind. Of each kind the first is
/// ready first.
[[nodiscard]] std::vector<GradientBucket> gradient_buckets(const std::vector<LocalParameter>& parameters,
                                                           std::int64_t bucket_bytes, std::int64_t element_bytes);

}  // namespace tandem
