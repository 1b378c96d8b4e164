// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "core/model_config.h"

namespace tandem {

/// A contiguous range of the flat gradient buffer (definition order) that is reduced as one.
struct GradientBucket {
  Interval elements;    ///< of the flat buffer
  Interval parameters;  ///< indices into gpt_parameters()
};

/// Parameters in backward order (last defined first), a new bucket whenever the next tensor would exceed `bucket_bytes`; a larger
/// tensor is a bucket of its own. 0: one bucket. Bucket 0 is ready first.
[[nodiscard]] std::vector<GradientBucket> gradient_buckets(const std::vector<ParameterSpec>& parameters,
                                                           std::int64_t bucket_bytes, std::int64_t element_bytes);

}  // namespace tandem
