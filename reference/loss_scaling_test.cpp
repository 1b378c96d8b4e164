// SPDX-License-Identifier: Apache-2.0
#include "reference/loss_scaling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "reference/test_support.h"

namespace tandem::reference {
namespace {

TEST(DynamicLossScaler, FollowsEveryRecordedTrace) {
  std::ifstream stream(own_golden_folder() / "pieces" / "loss_scaler.json");
  ASSERT_TRUE(stream);
  const auto traces = nlohmann::json::parse(stream).at("traces");
  ASSERT_GE(traces.size(), 1U);
  for (const auto& trace : traces) {
    DynamicLossScaler scaler(
        {trace.at("init_scale"), trace.at("growth_factor"), trace.at("backoff_factor"), trace.at("growth_interval")});
    std::int64_t updates = 0;
    for (std::size_t step = 0; step < trace.at("overflow").size(); ++step) {
      ASSERT_EQ(scaler.scale(), trace.at("scale_used")[step]) << "step " << step;
      updates += scaler.finish_step(trace.at("overflow")[step] != 0) ? 1 : 0;
      ASSERT_EQ(scaler.scale(), trace.at("scale_after")[step]) << "step " << step;
      ASSERT_EQ(scaler.growth_tracker(), trace.at("growth_tracker_after")[step]) << "step " << step;
    }
    EXPECT_EQ(updates, trace.at("optimizer_steps_taken"));
  }
}

TEST(DynamicLossScaler, NeverGrowsPastTheLargestFloat) {
  DynamicLossScaler scaler({.initial_scale = 0x1p127, .growth_interval = 1});
  EXPECT_TRUE(scaler.finish_step(false));
  EXPECT_EQ(scaler.scale(), 0x1p127);
}

TEST(StaticLossScaler, SkipsAndChangesNothing) {
  StaticLossScaler scaler(1024.0);
  EXPECT_FALSE(scaler.finish_step(true));
  EXPECT_TRUE(scaler.finish_step(false));
  EXPECT_EQ(scaler.scale(), 1024.0);
}

/// Steps whose gradients overflow where the scale is more than `limit`, as fp16's do.
struct ScaledSteps {
  double limit;
  std::int64_t skipped = 0;
  double largest_scale = 0.0;

  template <class Scaler>
  void run(Scaler& scaler, int steps) {
    for (int step = 0; step < steps; ++step) {
      largest_scale = std::max(largest_scale, scaler.scale());
      if (!scaler.finish_step(scaler.scale() > limit)) ++skipped;
    }
  }
};

TEST(LiteralLossScaler, RunsAwayOnceItsCounterHasPassedTheInterval) {
  LiteralLossScaler scaler(1024.0, 10);
  for (int step = 0; step < 10; ++step) ASSERT_TRUE(scaler.finish_step(false));
  EXPECT_EQ(scaler.scale(), 1024.0);

  for (int step = 0; step < 8; ++step) ASSERT_TRUE(scaler.finish_step(false));

  EXPECT_EQ(scaler.stable_steps(), 18);
  EXPECT_EQ(scaler.scale(), 1024.0 * 256.0) << "doubled at each of eight steps";
  EXPECT_FALSE(scaler.finish_step(true));
  EXPECT_TRUE(scaler.finish_step(false));
  EXPECT_EQ(scaler.scale(), 1024.0 * 256.0) << "an overflow did not stop it";
}

TEST(LiteralLossScaler, SkipsEverySecondStepWhereTheRightOneSkipsOneInAnInterval) {
  constexpr int kInterval = 50;
  ScaledSteps literal{65536.0}, right{65536.0};
  LiteralLossScaler literal_scaler(65536.0, kInterval);
  DynamicLossScaler right_scaler({.initial_scale = 65536.0, .growth_interval = kInterval});

  literal.run(literal_scaler, 20 * kInterval);
  right.run(right_scaler, 20 * kInterval);

  // Past the first interval: doubles, overflows, halves, doubles again.
  EXPECT_EQ(literal.skipped, 19 * kInterval / 2);
  EXPECT_EQ(right.skipped, 19) << "one try after each interval";
}

TEST(LiteralLossScaler, GrowsWithoutEndWhereNothingOverflows) {
  ScaledSteps literal{INFINITY}, right{INFINITY};
  LiteralLossScaler literal_scaler(65536.0, 100);
  DynamicLossScaler right_scaler({.initial_scale = 65536.0, .growth_interval = 100});

  literal.run(literal_scaler, 301);
  right.run(right_scaler, 301);

  EXPECT_EQ(literal.largest_scale, 0x1p216);
  EXPECT_EQ(right.largest_scale, 0x1p19);
}

TEST(LossScaler, IsWhatThePlanAsksFor) {
  const auto scaler_of = [](const char* mode, const char* precision) {
    return LossScaler({.mode = mode, .initial = 8.0, .growth_interval = 1}, numerics_from_precision(precision));
  };
  struct Expected {
    const char* mode;
    const char* precision;
    double scale, after_good, after_overflow;
    bool skips;
  };
  for (const Expected& expected : {Expected{"auto", "fp32", 1, 1, 1, false}, Expected{"auto", "bf16", 1, 1, 1, false},
                                   Expected{"auto", "fp16", 8, 16, 8, true}, Expected{"auto", "fp16-autocast", 8, 16, 8, true},
                                   Expected{"none", "fp16", 1, 1, 1, false}, Expected{"static", "fp16", 8, 8, 8, true},
                                   Expected{"dynamic", "bf16", 8, 16, 8, true}}) {
    LossScaler scaler = scaler_of(expected.mode, expected.precision);
    EXPECT_EQ(scaler.scale(), expected.scale) << expected.mode << " " << expected.precision;
    EXPECT_TRUE(scaler.finish_step(false));
    EXPECT_EQ(scaler.scale(), expected.after_good) << expected.mode << " " << expected.precision;
    EXPECT_EQ(scaler.finish_step(true), !expected.skips) << expected.mode << " " << expected.precision;
    EXPECT_EQ(scaler.scale(), expected.after_overflow) << expected.mode << " " << expected.precision;
  }
}

}  // namespace
}  // namespace tandem::reference
