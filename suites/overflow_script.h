// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "suites/loss_scaling_run.h"

namespace tandem {

/// The run of a script that had the steps without overflow alone, with the scale, counter and number of skipped steps of the
/// dynamic rule beside it. Its state is that of the script's, to the last bit. Borrows nothing.
[[nodiscard]] Script without_overflows(const Script& script);

/// Every rank of a run with overflows decides, scales, counts and keeps its state as the rule says (reference/loss_scaling.h).
/// Of a dynamic scale.
[[nodiscard]] std::vector<Property> overflow_properties(const Script& script, const ScriptedRun& run);

}  // namespace tandem
