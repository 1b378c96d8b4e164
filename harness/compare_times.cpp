// SPDX-License-Identifier: Apache-2.0
// Times of two runs: one case by its samples, all cases by their ratios.
#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "harness/compare.h"

namespace tandem {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kCertain = 0.95;

void decide(MetricComparison& row, double threshold) {
  const double slower = 1 + threshold;
  const double faster = 1 / (1 + threshold);
  const ConfidenceInterval& interval = row.ratio.ci95;
  if (interval.low > slower) {
    row.change = Change::worse;
  } else if (interval.high < faster) {
    row.change = Change::better;
  } else if (!(interval.low >= faster && interval.high <= slower)) {
    row.change = Change::too_noisy;
    row.reason = fmt::format("the interval reaches across {:.3g}", interval.high > slower ? slower : faster);
  }
}

}  // namespace

MetricComparison compare_times(const std::string& case_name, const std::string& metric, const std::vector<double>& a,
                               const std::vector<double>& b, double scale_a, double scale_b, double threshold) {
  MetricComparison row{case_name, metric, median(a) * scale_a, median(b) * scale_b, {1, {1, 1}}, Change::same, {}};
  row.effect = cliffs_delta(a, b);
  if (a.empty() || b.empty()) {
    row.ratio = {kNaN, {kNaN, kNaN}};
    row.change = Change::not_comparable;
    row.reason = fmt::format("{} has no samples", a.empty() ? "A" : "B");
    return row;
  }
  // The same samples are one measurement, and there is nothing to tell apart.
  if (a == b && scale_a == scale_b) return row;
  const std::size_t fewest = std::min(a.size(), b.size());
  if (fewest >= kFewestSamples) {
    row.ratio = ratio_of_medians(a, b);
  } else {
    const ExactRatio exact = exact_ratio_interval(a, b);
    row.ratio = {median(b) / median(a), exact.interval};
    row.coverage = exact.coverage;
  }
  const double scale = scale_b / scale_a;
  row.ratio = {row.ratio.value * scale, {row.ratio.ci95.low * scale, row.ratio.ci95.high * scale}};
  if (row.coverage < kCertain) {
    row.change = Change::few_samples;
    row.reason = fmt::format("{} and {} samples: the interval covers {:.0f} %", a.size(), b.size(), 100 * row.coverage);
    return row;
  }
  decide(row, threshold);
  return row;
}

MetricComparison compare_all_times(const std::vector<MetricComparison>& rows, double threshold) {
  std::vector<double> ratios, of_a, of_b;
  for (const MetricComparison& row : rows) {
    if (row.metric != "step_seconds" || !std::isfinite(row.ratio.value) || !(row.ratio.value > 0)) continue;
    ratios.push_back(row.ratio.value);
    of_a.push_back(row.a);
    of_b.push_back(row.b);
  }
  MetricComparison all{
      fmt::format("all {} cases", ratios.size()), "step_seconds", kNaN, kNaN, {kNaN, {kNaN, kNaN}}, Change::same, {}};
  all.effect = kNaN;
  if (ratios.size() < kFewestSamples) {
    all.change = Change::not_comparable;
    all.reason = fmt::format("{} cases with times; at least {} are needed", ratios.size(), kFewestSamples);
    return all;
  }
  all.a = geometric_mean(of_a).value;
  all.b = geometric_mean(of_b).value;
  all.ratio = geometric_mean(ratios);
  decide(all, threshold);
  return all;
}

}  // namespace tandem
