// SPDX-License-Identifier: Apache-2.0
#include "optimized/loss_scaling/loss_scaler.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tandem {
namespace {

LossScaleConfig config_of(double initial, std::int64_t interval) {
  LossScaleConfig config;
  config.initial = initial;
  config.growth_interval = interval;
  return config;
}

struct Row {
  bool overflowed;
  double scale_after;
  std::int64_t tracker_after;
};

PitfallSet with(Pitfall pitfall) { return PitfallSet(std::vector<Pitfall>{pitfall}); }

// Index of the first row that the scaler leaves otherwise; -1 where it follows all of them.
int first_difference(LossScaler& scaler, const std::vector<Row>& rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool applied = scaler.finish_step(rows[i].overflowed);
    if (applied == rows[i].overflowed || scaler.scale() != rows[i].scale_after ||
        scaler.growth_tracker() != rows[i].tracker_after) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// Interval 3: growth on the third good step in a row, also right after growing, and a count that an overflow restarts.
std::vector<Row> script() {
  return {{false, 1024, 1}, {false, 1024, 2}, {false, 2048, 0}, {false, 2048, 1}, {true, 1024, 0},
          {false, 1024, 1}, {false, 1024, 2}, {true, 512, 0},   {true, 256, 0},   {false, 256, 1},
          {false, 256, 2},  {false, 512, 0},  {false, 512, 1},  {false, 512, 2},  {false, 1024, 0}};
}

TEST(LossScaler, FollowsTheScript) {
  LossScaler scaler(config_of(1024, 3), true, true);
  EXPECT_EQ(scaler.scale(), 1024);
  EXPECT_EQ(first_difference(scaler, script()), -1);
  EXPECT_EQ(scaler.skipped_steps(), 3);
}

TEST(LossScaler, GrowsAtEveryGoodStepWithIntervalOne) {
  LossScaler scaler(config_of(4, 1), true, true);
  EXPECT_EQ(first_difference(scaler, {{false, 8, 0}, {false, 16, 0}, {true, 8, 0}, {false, 16, 0}}), -1);
}

TEST(LossScaler, UsesItsFactors) {
  LossScaleConfig config = config_of(8, 2);
  config.growth_factor = 3;
  config.backoff_factor = 0.25;
  LossScaler scaler(config, true, true);
  EXPECT_EQ(first_difference(scaler, {{false, 8, 1}, {false, 24, 0}, {true, 6, 0}, {true, 1.5, 0}}), -1);
}

TEST(LossScaler, DoesNotGrowBeyondTheLargestFloat) {
  const double top = std::ldexp(1.0, 127);
  LossScaler scaler(config_of(top / 2, 2), true, true);
  EXPECT_EQ(first_difference(scaler, {{false, top / 2, 1}, {false, top, 0}, {false, top, 1}, {false, top, 0}, {false, top, 1}}),
            -1);
}

TEST(LossScaler, HasNoLowerBound) {
  LossScaler scaler(config_of(2, 1000), true, true);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(scaler.finish_step(true));
  EXPECT_EQ(scaler.scale(), std::ldexp(1.0, -99));
  EXPECT_EQ(scaler.skipped_steps(), 100);
}

TEST(LossScaler, StaticSkipsButKeepsItsScale) {
  LossScaler scaler(config_of(128, 1), false, true);
  EXPECT_EQ(first_difference(scaler, {{false, 128, 0}, {true, 128, 0}, {false, 128, 0}, {true, 128, 0}}), -1);
  EXPECT_EQ(scaler.skipped_steps(), 2);
  EXPECT_FALSE(scaler.dynamic());
}

TEST(LossScaler, OffIsOneAndNeverSkips) {
  for (const bool dynamic : {false, true}) {
    LossScaler scaler(config_of(128, 1), dynamic, false);
    for (const bool overflowed : {false, true, true, false}) {
      EXPECT_TRUE(scaler.finish_step(overflowed));
      EXPECT_EQ(scaler.scale(), 1.0);
    }
    EXPECT_EQ(scaler.skipped_steps(), 0);
    EXPECT_EQ(scaler.growth_tracker(), 0);
    EXPECT_FALSE(scaler.enabled() || scaler.dynamic());
  }
}

TEST(LossScaler, GoesOnFromASavedStateAtEveryStep) {
  const std::vector<Row> rows = script();
  for (std::size_t saved_after = 0; saved_after < rows.size(); ++saved_after) {
    const auto middle = rows.begin() + static_cast<std::ptrdiff_t>(saved_after);
    LossScaler first(config_of(1024, 3), true, true);
    ASSERT_EQ(first_difference(first, {rows.begin(), middle}), -1);

    LossScaler second(config_of(65536, 3), true, true);
    second.set_state(first.state());

    EXPECT_EQ(second.state(), first.state());
    EXPECT_EQ(first_difference(second, {middle, rows.end()}), -1) << "saved after step " << saved_after;
    EXPECT_EQ(second.skipped_steps(), 3);
  }
}

TEST(LossScaler, TakesOnlyTheSkippedStepsWhereThePlanSetsTheScale) {
  LossScaler fixed(config_of(128, 3), false, true);
  fixed.set_state({4096, 2, 5});
  EXPECT_EQ(fixed.state(), (LossScalerState{128, 0, 5}));
  LossScaler off({}, true, false);
  off.set_state({4096, 2, 5});
  EXPECT_EQ(off.state(), (LossScalerState{1, 0, 5}));
}

TEST(LossScaler, GrowsAfterAResumeWithAShorterInterval) {
  LossScaler scaler(config_of(1024, 3), true, true);
  scaler.set_state({64, 10, 0});
  EXPECT_EQ(first_difference(scaler, {{false, 128, 0}, {false, 128, 1}}), -1);
}

TEST(LossScaler, RefusesWhatMakesNoSense) {
  const auto bad = [](auto change) {
    LossScaleConfig config;
    change(config);
    EXPECT_THROW(LossScaler(config, true, true), ContractError);
    EXPECT_NO_THROW(LossScaler(config, true, false));
  };
  bad([](LossScaleConfig& config) { config.initial = 0; });
  bad([](LossScaleConfig& config) { config.initial = 1e39; });
  bad([](LossScaleConfig& config) { config.growth_factor = 1; });
  bad([](LossScaleConfig& config) { config.backoff_factor = 1; });
  bad([](LossScaleConfig& config) { config.backoff_factor = 0; });
  bad([](LossScaleConfig& config) { config.growth_interval = 0; });

  LossScaler scaler(LossScaleConfig{}, true, true);
  for (const LossScalerState& state :
       {LossScalerState{-1, 0, 0}, LossScalerState{1, -1, 0}, LossScalerState{1, 0, -1},
        LossScalerState{std::numeric_limits<double>::quiet_NaN(), 0, 0}, LossScalerState{1e39, 0, 0}}) {
    EXPECT_THROW(scaler.set_state(state), ContractError) << state.scale;
  }
  EXPECT_EQ(scaler.state(), (LossScalerState{65536, 0, 0}));
}

TEST(LossScaler, PlantedFaultsLeaveTheScriptWhereTheyMust) {
  LossScaler keeps(config_of(1024, 3), true, true, with(Pitfall::overflow_keeps_growth_count));
  EXPECT_EQ(first_difference(keeps, script()), 4);
  LossScaler exceeds(config_of(1024, 3), true, true, with(Pitfall::growth_count_exceeds));
  EXPECT_EQ(first_difference(exceeds, script()), 2);
}

// What a scaler did along a golden trace: the first step at which it differs, and how many updates it applied.
struct Outcome {
  int first_difference = -1;
  std::int64_t updates = 0;
};

Outcome follow(const nlohmann::json& trace, const PitfallSet& pitfalls) {
  LossScaleConfig config = config_of(trace["init_scale"], trace["growth_interval"]);
  config.growth_factor = trace["growth_factor"];
  config.backoff_factor = trace["backoff_factor"];
  LossScaler scaler(config, true, true, pitfalls);
  Outcome outcome;
  for (std::size_t i = 0; i < trace["overflow"].size(); ++i) {
    const double used = scaler.scale();
    outcome.updates += scaler.finish_step(trace["overflow"][i] == 1) ? 1 : 0;
    const bool same = used == trace["scale_used"][i] && scaler.scale() == trace["scale_after"][i] &&
                      scaler.growth_tracker() == trace["growth_tracker_after"][i];
    if (!same && outcome.first_difference < 0) outcome.first_difference = static_cast<int>(i);
  }
  return outcome;
}

class GoldenLossScaler : public testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path file = std::filesystem::path(TANDEM_SOURCE_DIR) / "../shared/golden/pieces/loss_scaler.json";
    std::ifstream stream(file);
    if (!stream) GTEST_SKIP() << "no golden traces at " << file.string();
    traces_ = nlohmann::json::parse(stream)["traces"];
    ASSERT_FALSE(traces_.empty());
  }
  nlohmann::json traces_;
};

TEST_F(GoldenLossScaler, EveryTraceIsFollowedExactly) {
  for (const nlohmann::json& trace : traces_) {
    SCOPED_TRACE(testing::Message() << "growth interval " << trace["growth_interval"]);
    ASSERT_GT(trace["overflow"].size(), 0U);
    const Outcome outcome = follow(trace, {});
    EXPECT_EQ(outcome.first_difference, -1);
    EXPECT_EQ(outcome.updates, trace["optimizer_steps_taken"]);
  }
}

TEST_F(GoldenLossScaler, NoTraceForgivesAPlantedFault) {
  for (const nlohmann::json& trace : traces_) {
    SCOPED_TRACE(testing::Message() << "growth interval " << trace["growth_interval"]);
    EXPECT_GE(follow(trace, with(Pitfall::overflow_keeps_growth_count)).first_difference, 0);
    EXPECT_GE(follow(trace, with(Pitfall::growth_count_exceeds)).first_difference, 0);
  }
}

}  // namespace
}  // namespace tandem
