// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "harness/trace_compare_recorder.h"
#include "reference/training.h"
#include "suites/pair.h"

namespace tandem {

/// The two optimizers of a comparison: SGD without clipping and decay, for the one step that hides nothing, and the case's own.
[[nodiscard]] OptimizerConfig plain_sgd(const PairInputs& inputs);
[[nodiscard]] OptimizerConfig own_optimizer(const PairInputs& inputs);

/// The K steps of a comparison as the reference runs them: one rank, one micro-batch. Borrows `inputs`.
[[nodiscard]] reference::TrainingRun reference_run(const PairInputs& inputs);

/// One training step of the engine on the plan's ranks: activations and their gradients, then gradients of parameters, to
/// `trace`.
void trace_one_step(const PairInputs& inputs, const RunContext& context, TraceRecorder& trace);

}  // namespace tandem
