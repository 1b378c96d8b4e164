// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "harness/finding.h"
#include "harness/verdict.h"

namespace tandem {

/// Looks at a verdict with fresh eyes: as many tensors as the truth has were judged, each against a floor and a bound that are
/// not above those derived here from the evidence, and the replicas of all ranks were looked at. Whatever widened a bound,
/// dropped a tensor or looked at one rank alone makes the verdict invalid, not passed.
[[nodiscard]] std::optional<Finding> audit(const Verdict& verdict, const Sides& sides);

}  // namespace tandem
