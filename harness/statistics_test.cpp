// SPDX-License-Identifier: Apache-2.0
#include "harness/statistics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "harness/measurement.h"

namespace tandem {
namespace {

TEST(Statistics, SummaryKeepsTheRawSamplesInTheirOrder) {
  const Summary summary = summarise({3, 1, 2});
  EXPECT_EQ(summary.samples, (std::vector<double>{3, 1, 2}));
  EXPECT_DOUBLE_EQ(summary.median, 2);
  EXPECT_DOUBLE_EQ(summary.p10, 1.2);
  EXPECT_DOUBLE_EQ(summary.p90, 2.8);
}

TEST(Statistics, SummaryOfNothingIsNaN) {
  const Summary summary = summarise({});
  EXPECT_TRUE(std::isnan(summary.median) && std::isnan(summary.p10) && std::isnan(summary.ci95_high));
}

TEST(Statistics, BootstrapIntervalHoldsTheMedianAndIsTheSameEveryTime) {
  std::vector<double> samples;
  for (std::uint64_t i = 0; i < 41; ++i) samples.push_back(10 + parameter_normal(3, "samples", i));
  const Summary first = summarise(samples);
  const Summary second = summarise(samples);

  EXPECT_LT(first.ci95_low, first.median);
  EXPECT_GT(first.ci95_high, first.median);
  // Of a normal sample the median's standard error is 1.253 sigma / sqrt(n), about 0.196 here; the interval spans about 4 of
  // them.
  EXPECT_NEAR(first.ci95_high - first.ci95_low, 4 * 0.196, 0.5);
  EXPECT_EQ(first.ci95_low, second.ci95_low);
  EXPECT_EQ(first.ci95_high, second.ci95_high);
}

TEST(Statistics, BootstrapIntervalCoversTheTrueMedianAboutAsOftenAsItSays) {
  int covered = 0;
  constexpr int kTrials = 100;
  for (std::uint64_t trial = 0; trial < kTrials; ++trial) {
    std::vector<double> samples;
    for (std::uint64_t i = 0; i < 25; ++i) samples.push_back(parameter_normal(trial, "coverage", i));
    const Summary summary = summarise(samples);
    covered += summary.ci95_low <= 0 && 0 <= summary.ci95_high ? 1 : 0;
  }
  EXPECT_GE(covered, 88);
  EXPECT_LE(covered, 100);
}

TEST(Statistics, RatioOfMediansCarriesAnIntervalOfItsOwn) {
  const Ratio ratio = ratio_of_medians({1, 1, 1, 1, 1}, {2, 2, 2, 2, 2});
  EXPECT_DOUBLE_EQ(ratio.value, 2);
  EXPECT_DOUBLE_EQ(ratio.ci95.low, 2);
  EXPECT_DOUBLE_EQ(ratio.ci95.high, 2);
  EXPECT_TRUE(std::isnan(ratio_of_medians({}, {1}).value));
}

TEST(Statistics, CliffsDeltaCountsPairs) {
  EXPECT_DOUBLE_EQ(cliffs_delta({1, 2, 3}, {4, 5}), 1);
  EXPECT_DOUBLE_EQ(cliffs_delta({4, 5}, {1, 2, 3}), -1);
  EXPECT_DOUBLE_EQ(cliffs_delta({1, 2, 3}, {2, 2, 2}), 0);
  EXPECT_DOUBLE_EQ(cliffs_delta({1, 3}, {2, 4}), 0.5);  // three of four pairs above, one below
  EXPECT_TRUE(std::isnan(cliffs_delta({}, {1})));
}

// Coverages by counting orders: 3 and 3 samples have C(6, 3) = 20, of which 2 leave the whole range of ratios on one side of r.
TEST(Statistics, TheExactIntervalCoversWhatCountingOrdersSays) {
  const ExactRatio three = exact_ratio_interval({1, 2, 4}, {3, 6, 12});
  EXPECT_DOUBLE_EQ(three.coverage, 1 - 2.0 / 20);
  EXPECT_DOUBLE_EQ(three.interval.low, 3.0 / 4);
  EXPECT_DOUBLE_EQ(three.interval.high, 12);
  EXPECT_NEAR(exact_ratio_interval({1, 2, 3, 4}, {1, 2, 3, 4}).coverage, 1 - 2.0 / 70, 1e-12);
  EXPECT_NEAR(exact_ratio_interval({1}, {1, 2, 3}).coverage, 1 - 2.0 / 4, 1e-12);
  // 5 and 5: P(U <= 2) = (1 + 1 + 2) / 252 is 1.6 %, P(U <= 3) = 7 / 252 is 2.8 %: the third smallest and largest.
  const ExactRatio five = exact_ratio_interval({1, 1, 1, 1, 1}, {1, 2, 3, 4, 5});
  EXPECT_NEAR(five.coverage, 1 - 2 * 4.0 / 252, 1e-12);
}

TEST(Statistics, TheGeometricMeanOfRatiosIsSymmetric) {
  EXPECT_NEAR(geometric_mean({2, 0.5}).value, 1, 1e-12);
  const Ratio mean = geometric_mean({1.1, 1.1, 1.1});
  EXPECT_NEAR(mean.value, 1.1, 1e-12);
  EXPECT_NEAR(mean.ci95.low, 1.1, 1e-12);
}

}  // namespace
}  // namespace tandem
