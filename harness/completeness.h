// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "harness/finding.h"

namespace tandem {

/// Each side has an identity of its own and a unit roundoff that suits its role: truth at least as precise as the candidate,
/// yardstick exactly as precise. A side that the criterion needs is there.
[[nodiscard]] std::optional<Finding> check_sides(Criterion criterion, const Sides& sides);

/// All sides give the same stages, each with the same tensors of the same sizes (convergence: no such demand), and every value is
/// finite. Buffers are poisoned with NaN, so a tensor that was never written is found here.
[[nodiscard]] std::optional<Finding> check_completeness(Criterion criterion, const Sides& sides);

}  // namespace tandem
