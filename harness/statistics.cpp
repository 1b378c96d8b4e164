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

}  // namespace

double quantile(std::span<const double> sorted, double q) {
  if (sorted.empty()) return kNaN;
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  if (below + 1 >= sorted.size()) return sorted.back();
  const double fraction = position - static_cast<double>(below);
  return sorted[below] + fraction * (sorted[below + 1] - sorted[below]);
}

double median(std::vector<double> samples) {
  std::ranges::sort(samples);
  return quantile(samples, 0.5);
}

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
