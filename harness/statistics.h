// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "core/rng.h"

namespace tandem {

/// Quantile q in [0, 1] of sorted samples, interpolated linearly between the two nearest: position q (n - 1). NaN when empty.
[[nodiscard]] double quantile(std::span<const double> sorted, double q);
[[nodiscard]] double median(std::vector<double> samples);

struct ConfidenceInterval {
  double low = 0, high = 0;
};

inline constexpr int kBootstrapResamples = 2000;

/// Percentile bootstrap (Efron 1979): the 2.5 % and 97.5 % quantiles of `statistic` over kBootstrapResamples calls. `statistic`
/// draws its own resample from the generator, whose seed is fixed: the same samples give the same interval.
[[nodiscard]] ConfidenceInterval bootstrap95(const std::function<double(CounterRng&)>& statistic);

/// median(b) / median(a) with its interval, the two resampled independently. NaN where either is empty.
struct Ratio {
  double value = 0;
  ConfidenceInterval ci95;
};
[[nodiscard]] Ratio ratio_of_medians(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace tandem
