// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "suites/parallel_cases.h"

namespace tandem {

/// What one step on one batch gives, from the same parameters each time.
struct StepOutcome {
  double loss = 0;
  double valid_tokens = 0;
  std::map<std::string, std::vector<double>, std::less<>> gradients;
};

/// One rank of the engine, and the reference in the same precision (fp32 or fp64). Dropout as the model has it.
[[nodiscard]] std::vector<StepOutcome> engine_outcomes(const PairInputs& inputs, const std::vector<Batch>& batches,
                                                       const RunContext& context);
[[nodiscard]] std::vector<StepOutcome> reference_outcomes(const PairInputs& inputs, const std::vector<Batch>& batches);

/// Loss and gradients that are not equal to the last bit.
[[nodiscard]] double tensors_that_differ(const StepOutcome& a, const StepOutcome& b);
/// Largest of |a - b| / |b| over loss and gradients, norms of tensors; those that are nothing beside the whole gradient are set
/// against it.
[[nodiscard]] double largest_difference(const StepOutcome& a, const StepOutcome& b);

}  // namespace tandem
