// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/pitfall.h"
#include "core/plan.h"
#include "core/step_program.h"

namespace tandem {

/// The program of `rank` for one training step: its pipeline schedule's forward and backward passes of micro-batches, with the
/// communication of every axis in between, then the sums of gradients, the norm and the optimizer. Micro-batches without rows
/// stay in the program (with no FLOPs and no bytes), so that all ranks run the same sequence.
///
/// FLOPs are those of matrix products, a multiply-add counting 2, causal attention counted as causal (docs/measuring.md).
/// sequence: tokens per row of the batches of this step.
[[nodiscard]] StepProgram lower(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int rank,
                                const PitfallSet& pitfalls = {});

/// Forward passes only, of a global batch of `rows` rows in the plan's micro-batches one after the other, and the sum of the
/// losses.
[[nodiscard]] StepProgram lower_evaluation(const TrainingPlan& plan, const GptConfig& model, std::int64_t rows,
                                           std::int64_t sequence, int rank);

/// What check_programs() must find in the programs that lower() makes for all ranks.
[[nodiscard]] ProgramExpectation expectation(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence);

}  // namespace tandem
