// SPDX-License-Identifier: Apache-2.0
#include "reference/loss_scaling.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tandem::reference
