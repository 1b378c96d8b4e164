// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "harness/case.h"

namespace tandem {

/// Gradients reduced while the backward pass goes on, on links that take time: what is hidden, what is left, and which bucket
/// size is best. Part of overlap.
void add_overlap_time_cases(CaseList& cases);

/// Products of tensor parallelism whose sums are scattered in pieces (OverlapConfig::tensor_chunks): against the reference,
/// against whole products, late, and in time. Part of overlap.
void add_overlap_tensor_cases(CaseList& cases);

}  // namespace tandem
