// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "harness/finding.h"

namespace tandem {

/// A comparison in which nothing moved, or whose parts of the batch were the same data, proves nothing: `invalid`. For every
/// side:
///   - gradients are not all zero
///   - in every stage "*_parameters" some value differs from initial_parameters
///   - losses of more than one step are not all equal
///   - with more than one rank: the parts of the batch (data x context) are given, and their number divides that of the ranks;
///     where there are several, at least two had rows, and their inputs are not all the same
[[nodiscard]] std::optional<Finding> check_liveness(const Sides& sides);

}  // namespace tandem
