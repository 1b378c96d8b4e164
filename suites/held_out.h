// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "suites/pair.h"

namespace tandem {

/// The engine's loss of two batches of held-out rows, of different numbers of rows, and of the first once more, before any
/// training: those of the reference within rounding, the same bits of the same rows, the same on all ranks.
[[nodiscard]] CaseEvidence beside_held_out_rows(const PairInputs& inputs, const RunContext& context);

}  // namespace tandem
