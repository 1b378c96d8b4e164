// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "suites/pair.h"

namespace tandem {

/// Closed forms of the memory peak of one rank (docs/measuring.md, suites/predicted_memory.cpp): parameters, gradients and
/// optimizer state that it keeps, with ZeRO also what exists of whole units for a while; kept activations of the micro-batches
/// that are in flight at once; worst rank of each. Workspace and communication buffers are not predicted (0).
[[nodiscard]] BytesByCategory predicted_peak(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer,
                                             std::int64_t sequence);

/// The same with what the step programs say of workspace and, where the plan keeps state in host memory, the staging buffers and
/// the host's bytes. Memory for communication is not predicted (0).
struct MemoryForecast {
  BytesByCategory device{}, host{};
};
[[nodiscard]] MemoryForecast forecast_memory(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer,
                                             std::int64_t sequence);

/// Bytes that all ranks send for the gradients of one step of plain data parallelism: ranks * 2 b (ranks - 1) / ranks, b = bytes
/// of all gradients.
[[nodiscard]] std::int64_t predicted_gradient_bytes(const GptConfig& model, const TrainingPlan& plan);

/// Programs of all ranks, and what the checker makes of them.
[[nodiscard]] std::vector<StepProgram> programs_of(const PairInputs& inputs);
[[nodiscard]] ProgramFacts facts_of(const PairInputs& inputs);
/// The step programs of all ranks are complete and free of deadlock: no problems.
[[nodiscard]] Property proven_program(const PairInputs& inputs);

/// Bytes that all ranks sent for a purpose, by the recorded spans of all steps.
[[nodiscard]] std::int64_t bytes_sent(const Measured& measured, Purpose purpose);
/// Bytes on the wire for a purpose are those that the step programs say, over all steps.
[[nodiscard]] Property sent_as_programmed(const PairInputs& inputs, const Measured& measured, Purpose purpose);
/// Activations of the fullest rank are those of the formula, every tensor rounded up to 64 bytes.
[[nodiscard]] Property activations_as_predicted(const PairInputs& inputs, const Measured& measured);
/// Parameter, gradient and optimizer bytes of the fullest rank are those of its shards.
[[nodiscard]] Property state_as_predicted(const PairInputs& inputs, const Measured& measured);

}  // namespace tandem
