// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "harness/case.h"

namespace tandem {

/// Steps in time may be a part longer than predicted, and by what the real work of the small model and late wake-ups add.
inline constexpr double kOverlapFactor = 1.1, kOverlapSlackSeconds = 0.003;

/// Gradients reduced while the backward pass goes on, on links that take time: what is hidden, what is left, and which bucket
/// size is best. Part of overlap.
void add_overlap_time_cases(CaseList& cases);

/// Products of tensor parallelism whose sums are scattered in pieces (OverlapConfig::tensor_chunks): against the reference,
/// against whole products, late, and in time. Part of overlap.
void add_overlap_tensor_cases(CaseList& cases);

}  // namespace tandem
