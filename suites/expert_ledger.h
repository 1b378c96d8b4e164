// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "suites/pair.h"

namespace tandem {

/// What the engine reports of the routing of its K steps, against the reference: every choice of every token in every layer is
/// kept or dropped, as many are kept as the reference keeps, and the auxiliary loss is that of the global batch, however tokens
/// and experts are dealt. Of models with experts and runs of at least one step.
[[nodiscard]] std::vector<Property> expert_ledger(const PairInputs& inputs, const EngineRun& run);

}  // namespace tandem
