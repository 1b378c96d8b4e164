// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "core/quantile.h"
#include "core/rng.h"

namespace tandem {

/// Of 95 %; NaN where nothing was measured.
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

/// Cliff's delta, (#{b > a} - #{b < a}) / (n_a n_b) over all pairs: 1 where every sample of b lies above every one of a, -1 where
/// below, 0 where neither side tends to be larger. NaN where either is empty.
[[nodiscard]] double cliffs_delta(const std::vector<double>& a, const std::vector<double>& b);

/// Interval of the factor r by which b is a scaled (positive samples), without an approximation, for the fewest samples: the k-th
/// smallest and k-th largest of all n_a n_b ratios b_j / a_i (Hodges and Lehmann 1963), k as large as leaves 95 % by the exact
/// distribution of the Mann-Whitney statistic; k = 1 where none does. Of 3 and 3 samples it covers 90 %, of 4 and 4, 97 %.
struct ExactRatio {
  ConfidenceInterval interval;
  double coverage = 0;  ///< probability that the interval holds r, were only chance between the runs
};
[[nodiscard]] ExactRatio exact_ratio_interval(const std::vector<double>& a, const std::vector<double>& b);

/// Geometric mean of `ratios` with its percentile bootstrap interval over them. NaN where there are none.
[[nodiscard]] Ratio geometric_mean(const std::vector<double>& ratios);

}  // namespace tandem
