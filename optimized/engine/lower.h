// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/plan.h"
#include "core/step_program.h"

namespace tandem {

/// This data rank's program of one training step: for each micro-batch forward and backward, then the reduction of the gradient
/// buckets, the norm and the optimizer. Micro-batches without rows stay in the program (with no FLOPs and no bytes), so that all
/// ranks run the same sequence.
///
/// FLOPs are those of matrix products, a multiply-add counting 2, causal attention counted as causal (docs/measuring.md).
/// sequence: tokens per row of the batches of this step.
[[nodiscard]] StepProgram lower(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int data_rank);

[[nodiscard]] ProgramExpectation expectation(const TrainingPlan& plan, const GptConfig& model);

}  // namespace tandem
