// SPDX-License-Identifier: Apache-2.0
#include "core/checkpoint_interval.h"

#include <cmath>
#include <random>

#include <gtest/gtest.h>

namespace tandem {
namespace {

CheckpointCosts costs(double save, double restart, double failure) {
  CheckpointCosts result;
  result.save_seconds = save;
  result.restart_seconds = restart;
  result.failure_seconds = failure;
  return result;
}

// The interval with the best goodput, by bisection of the slope's sign: goodput has one maximum.
double best_interval(const CheckpointCosts& of) {
  double low = 1e-6 * of.failure_seconds;
  double high = 20 * of.failure_seconds;
  for (int i = 0; i < 200; ++i) {
    const double left = low + (high - low) / 3;
    const double right = high - (high - low) / 3;
    (goodput(of, left) < goodput(of, right) ? low : high) = goodput(of, left) < goodput(of, right) ? left : right;
  }
  return (low + high) / 2;
}

TEST(CheckpointInterval, YoungIsTheRootOfTwiceSaveTimesFailure) {
  EXPECT_DOUBLE_EQ(young_interval_seconds(costs(2, 0, 100)), 20.0);
  EXPECT_DOUBLE_EQ(young_interval_seconds(costs(0.5, 7, 3600)), 60.0);
}

TEST(CheckpointInterval, DalyByHand) {
  // d = 2, M = 100: 20 (1 + 0.1 / 3 + 2 / 1800) - 2
  EXPECT_NEAR(daly_interval_seconds(costs(2, 0, 100)), 18.6888888888888889, 1e-12);
}

// Of the series that it is, the first term left out is of the order (d / 2M)^(3/2) of the interval.
TEST(CheckpointInterval, DalyIsTheOptimumToTheOrderOfItsSeries) {
  for (const double save : {0.01, 0.1, 1.0, 10.0, 60.0}) {
    const CheckpointCosts of = costs(save, 5, 100);
    const double best = best_interval(of);
    const double order = std::pow(save / 200, 1.5);
    EXPECT_NEAR(daly_interval_seconds(of) / best, 1, order + 1e-6) << "save " << save;
    EXPECT_GE(goodput(of, daly_interval_seconds(of)), (1 - order * order) * goodput(of, best) * (1 - 1e-12)) << "save " << save;
  }
}

TEST(CheckpointInterval, DalyIsNearerToTheOptimumThanYoung) {
  for (const double save : {1.0, 5.0, 20.0}) {
    const CheckpointCosts of = costs(save, 0, 100);
    const double best = best_interval(of);
    EXPECT_LT(std::abs(daly_interval_seconds(of) - best), std::abs(young_interval_seconds(of) - best));
  }
}

TEST(CheckpointInterval, DalyIsTheTimeBetweenFailuresWhereSavingTakesLonger) {
  EXPECT_DOUBLE_EQ(daly_interval_seconds(costs(200, 0, 100)), 100.0);
  EXPECT_DOUBLE_EQ(daly_interval_seconds(costs(500, 0, 100)), 100.0);
}

TEST(CheckpointInterval, OptimumDoesNotDependOnTheRestart) {
  EXPECT_NEAR(best_interval(costs(3, 0, 400)), best_interval(costs(3, 50, 400)), 1e-3);
}

TEST(CheckpointInterval, GoodputApproachesTheShareOfWorkWhereNothingFails) {
  EXPECT_NEAR(goodput(costs(5, 1, 1e9), 95), 0.95, 1e-6);
  EXPECT_LT(goodput(costs(5, 1, 100), 95), 0.6);
}

// A run with failures at random: work, save; what fails before the save is through is done again behind a restart, which can
// fail itself. The mean time of a segment must be that of the model within four standard errors.
TEST(CheckpointInterval, GoodputIsThatOfASimulatedRun) {
  constexpr int kSegments = 20000;
  for (const double interval : {10.0, 40.0, 120.0}) {
    const CheckpointCosts of = costs(4, 6, 100);
    std::mt19937_64 random(7);
    std::exponential_distribution<double> next_failure(1 / of.failure_seconds);
    double sum = 0;
    double squares = 0;
    for (int segment = 0; segment < kSegments; ++segment) {
      double seconds = 0;
      for (bool restart = false;; restart = true) {
        const double needed = (restart ? of.restart_seconds : 0) + interval + of.save_seconds;
        const double failure = next_failure(random);
        if (failure >= needed) {
          seconds += needed;
          break;
        }
        seconds += failure;
      }
      sum += seconds;
      squares += seconds * seconds;
    }
    const double mean = sum / kSegments;
    const double standard_error = std::sqrt((squares / kSegments - mean * mean) / kSegments);
    // M (1 - e^(-(t+d)/M)) e^((R+t+d)/M), the first attempt without a restart, is M e^(R/M) (e^((t+d)/M) - 1).
    const double modelled = interval / goodput(of, interval);
    EXPECT_NEAR(mean, modelled, 4 * standard_error) << "interval " << interval;
  }
}

}  // namespace
}  // namespace tandem
