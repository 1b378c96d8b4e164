// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/step_program.h"
#include "optimized/hybrid_parallel/parameter_layout.h"

namespace tandem {

/// Where a parameter is read and its gradient comes from, as RankExpectation::bucket_sources counts. `embedding` and `tied_head`:
/// whether this rank uses the token embedding so.
[[nodiscard]] std::vector<int> gradient_sources(const LocalParameter& parameter, bool embedding, bool tied_head);

/// Whether an operation adds to the gradients of a source. The head's come with head_loss, of which a rank without tokens has
/// none; what follows it on every rank, the backward_weight of head_norm, stands for it.
[[nodiscard]] bool adds_to(const Operation& operation, int source);

}  // namespace tandem
