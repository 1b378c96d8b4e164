// SPDX-License-Identifier: Apache-2.0
#include "harness/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "harness/measurement.h"

namespace tandem {
namespace {

constexpr std::uint64_t kBootstrapSeed = 20240229;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double resampled_median(const std::vector<double>& samples, CounterRng& rng) {
  std::vector<double> drawn(samples.size());
  for (double& value : drawn) value = samples[rng.next_below(samples.size())];
  return median(std::move(drawn));
}

// [u] probability that exactly u of the n m pairs have b below a, all orders of the samples being equally likely: the number of
// partitions of u into at most m parts of at most n each, over C(n + m, m). Built up by adding samples one at a time: the largest
// of i and j samples is one of a, which lies above all j of b, or one of b.
std::vector<double> mann_whitney_chances(std::size_t n, std::size_t m) {
  // [j][u], of i samples of a and j of b
  std::vector<std::vector<double>> chances(m + 1, std::vector<double>(n * m + 1, 0));
  for (std::size_t j = 0; j <= m; ++j) chances[j][0] = 1;
  for (std::size_t i = 1; i <= n; ++i) {
    for (std::size_t j = 1; j <= m; ++j) {
      const double largest_of_a = static_cast<double>(i) / static_cast<double>(i + j);
      for (std::size_t u = n * m + 1; u-- > 0;) {
        const double before = u >= j ? chances[j][u - j] : 0;  // i - 1 and j samples
        chances[j][u] = largest_of_a * before + (1 - largest_of_a) * chances[j - 1][u];
      }
    }
  }
  return chances[m];
}

}  // namespace

ConfidenceInterval bootstrap95(const std::function<double(CounterRng&)>& statistic) {
  CounterRng rng(kBootstrapSeed, "bootstrap");
  std::vector<double> values(kBootstrapResamples);
  for (double& value : values) value = statistic(rng);
  std::ranges::sort(values);
  return {quantile(values, 0.025), quantile(values, 0.975)};
}

Ratio ratio_of_medians(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || b.empty()) return {kNaN, {kNaN, kNaN}};
  return {median(b) / median(a),
          bootstrap95([&](CounterRng& rng) { return resampled_median(b, rng) / resampled_median(a, rng); })};
}

double cliffs_delta(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || b.empty()) return kNaN;
  std::int64_t above = 0;
  for (const double of_a : a) {
    for (const double of_b : b) above += (of_b > of_a ? 1 : 0) - (of_b < of_a ? 1 : 0);
  }
  return static_cast<double>(above) / (static_cast<double>(a.size()) * static_cast<double>(b.size()));
}

ExactRatio exact_ratio_interval(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || b.empty()) return {{kNaN, kNaN}, 0};
  std::vector<double> ratios;
  for (const double of_a : a) {
    for (const double of_b : b) ratios.push_back(of_b / of_a);
  }
  std::ranges::sort(ratios);
  const std::vector<double> chances = mann_whitney_chances(a.size(), b.size());
  // The interval from the k-th to the k-th last misses where fewer than k pairs lie on one side.
  double missed = 2 * chances[0];
  std::size_t k = 1;
  while (missed + 2 * chances[k] <= 0.05) missed += 2 * chances[k++];
  return {{ratios[k - 1], ratios[ratios.size() - k]}, std::max(0.0, 1 - missed)};
}

Ratio geometric_mean(const std::vector<double>& ratios) {
  if (ratios.empty()) return {kNaN, {kNaN, kNaN}};
  const auto mean_of = [&](const auto& drawn) {
    double sum = 0;
    for (std::size_t i = 0; i < ratios.size(); ++i) sum += std::log(drawn(i));
    return std::exp(sum / static_cast<double>(ratios.size()));
  };
  return {mean_of([&](std::size_t i) { return ratios[i]; }), bootstrap95([&](CounterRng& rng) {
            return mean_of([&](std::size_t) { return ratios[rng.next_below(ratios.size())]; });
          })};
}

Summary summarise(std::vector<double> samples) {
  Summary summary{kNaN, kNaN, kNaN, kNaN, kNaN, {}};
  if (samples.empty()) return summary;
  const ConfidenceInterval interval = bootstrap95([&](CounterRng& rng) { return resampled_median(samples, rng); });
  summary.ci95_low = interval.low;
  summary.ci95_high = interval.high;
  std::vector<double> sorted = samples;
  std::ranges::sort(sorted);
  summary.median = quantile(sorted, 0.5);
  summary.p10 = quantile(sorted, 0.1);
  summary.p90 = quantile(sorted, 0.9);
  summary.samples = std::move(samples);
  return summary;
}

}  // namespace tandem
