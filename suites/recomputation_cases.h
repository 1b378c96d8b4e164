// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "harness/case.h"
#include "reference/recomputation.h"
#include "suites/pair.h"

namespace tandem {

// Parts of the suite recomputation.

/// Measured bytes beside predicted ones in every mode, and beside the published formulas.
void add_recomputation_memory_cases(CaseList& cases);
/// Extra time beside extra FLOPs.
void add_recomputation_time_cases(CaseList& cases);
/// The properties of its case, of so many rounds.
[[nodiscard]] std::vector<Property> recomputation_times(const RunContext& context, int rounds);

/// One layer of the plan for the reference's closed forms: the first micro-batch of rank 0, which is the largest.
[[nodiscard]] reference::RecomputationSize layer_size(const PairInputs& inputs);
/// FLOPs of all ranks in one step, by the step programs: all of them, and those of phase recompute alone.
struct StepFlops {
  double all = 0;
  double recomputed = 0;
};
[[nodiscard]] StepFlops step_flops(const PairInputs& inputs);
/// Measured activation bytes of the fullest rank over those of the formula: |measured / predicted - 1| <= 0.1.
[[nodiscard]] Property activations_near_prediction(const Measured& measured, const std::string& name);

}  // namespace tandem
