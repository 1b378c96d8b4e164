// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

namespace tandem {

/// Quantile q in [0, 1] of sorted samples, interpolated linearly between the two nearest: position q (n - 1). NaN when empty.
[[nodiscard]] double quantile(std::span<const double> sorted, double q);
/// quantile(0.5) of samples in any order; of an even number the mean of the two in the middle.
[[nodiscard]] double median(std::vector<double> samples);

}  // namespace tandem
