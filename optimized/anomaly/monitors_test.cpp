// SPDX-License-Identifier: Apache-2.0
// Series of numbers, and what is decided about them.
#include "optimized/anomaly/monitors.h"

#include <cmath>
#include <limits>
#include <random>
#include <span>

#include <gtest/gtest.h>

#include "optimized/anomaly/policy.h"

namespace tandem {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

PitfallSet with(Pitfall pitfall) { return PitfallSet(std::span(&pitfall, 1)); }

AnomalyFinding of(AnomalyMonitor monitor) {
  AnomalyFinding finding;
  finding.monitor = monitor;
  return finding;
}

TEST(RobustWindow, MeasuresInDeviationsOfWhatIsUsual) {
  RobustWindow window(5, 0.0);
  for (const double x : {100.0, 1.0, 2.0, 3.0, 4.0, 1000.0}) window.add(x);  // the first has left by now

  EXPECT_EQ(window.count(), 5);
  EXPECT_EQ(window.median(), 3.0);
  EXPECT_FALSE(window.z(3.0).has_value()) << "five values are fewer than eight";
  EXPECT_NEAR(window.z(3.0 + 2 * 1.4826, 5).value(), 2.0, 1e-12);  // |x - 3| has median 1: 2, 1, 0, 1, 997
  EXPECT_NEAR(window.z(3.0 - 1.4826, 5).value(), -1.0, 1e-12);
  EXPECT_EQ(window.z(kNan, 5), kInfinity);
}

TEST(RobustWindow, TakesRoundingInAStillWindowForNothing) {
  RobustWindow still(8, 0.01), absolute(8, 0.0, 0.5);
  for (int i = 0; i < 8; ++i) still.add(2.0), absolute.add(0.0);

  EXPECT_NEAR(still.z(2.02).value(), 1.0, 1e-9);
  EXPECT_NEAR(absolute.z(1.0).value(), 2.0, 1e-12);
}

struct Row {
  AnomalyAction action;
  AnomalyMonitor monitor;
  AnomalyDecision expected;
  bool skips_batch = false;
};

TEST(Policy, DoesWhatTheActionSays) {
  using enum AnomalyAction;
  using M = AnomalyMonitor;
  using D = AnomalyDecision;
  const std::vector<Row> rows = {
      {off, M::loss_spike, D::go_on},
      {report, M::gradient_not_finite, D::go_on},
      {skip, M::loss_spike, D::skip_step},
      {clip, M::norm_spike, D::clip_harder},
      {clip, M::gradient_not_finite, D::skip_step},
      {rollback, M::activation_range, D::roll_back, true},
      {rollback, M::loss_spike, D::roll_back, true},
      {report, M::replica_divergence, D::go_on},
      {skip, M::replica_divergence, D::roll_back},
      {clip, M::weight_not_finite, D::roll_back},
      {rollback, M::weight_not_finite, D::roll_back},
      {skip, M::weight_range, D::go_on},
      {rollback, M::weight_range, D::roll_back},
      {rollback, M::scale_collapse, D::roll_back},
      {rollback, M::slow_collective, D::go_on},
      {rollback, M::slow_rank, D::go_on},
      {rollback, M::throughput_drop, D::go_on},
  };
  PolicyFacts facts{.retried = true, .can_go_back = true, .rollbacks_there = 0, .applied_norm = 10, .usual_norm = 2};
  for (const Row& row : rows) {
    AnomalyConfig config;
    config.action = row.action;
    const std::vector<AnomalyFinding> findings = {of(row.monitor)};

    const PolicyVerdict verdict = decide(config, findings, facts);

    EXPECT_EQ(verdict.decision, row.expected) << static_cast<int>(row.action) << " " << name(row.monitor);
    EXPECT_EQ(verdict.skip_batch, row.skips_batch) << name(row.monitor);
    EXPECT_EQ(verdict.clip_factor, row.expected == D::clip_harder ? 0.2 : 1.0);
  }
}

TEST(Policy, ComputesASuspiciousStepAgainFirst) {
  AnomalyConfig config;
  config.action = AnomalyAction::rollback;
  const std::vector<AnomalyFinding> step = {of(AnomalyMonitor::loss_spike)};
  const std::vector<AnomalyFinding> broken = {of(AnomalyMonitor::loss_spike), of(AnomalyMonitor::weight_not_finite)};
  const PolicyFacts facts{.can_go_back = true};

  EXPECT_EQ(decide(config, step, facts).decision, AnomalyDecision::retry);
  EXPECT_EQ(decide(config, broken, facts).decision, AnomalyDecision::roll_back);
  EXPECT_FALSE(decide(config, broken, facts).skip_batch) << "the batch is not to blame for the state";
  config.retry = false;
  EXPECT_EQ(decide(config, step, facts).decision, AnomalyDecision::roll_back);
}

TEST(Policy, GivesUpWhereGoingBackLeadsNowhere) {
  AnomalyConfig config;
  config.action = AnomalyAction::rollback;
  config.max_rollbacks = 2;
  const std::vector<AnomalyFinding> findings = {of(AnomalyMonitor::loss_spike)};
  const auto after = [&](std::int64_t rollbacks, const PitfallSet& pitfalls = {}) {
    return decide(config, findings, {.retried = true, .can_go_back = true, .rollbacks_there = rollbacks}, pitfalls).decision;
  };

  EXPECT_EQ(after(1), AnomalyDecision::roll_back);
  EXPECT_EQ(after(2), AnomalyDecision::give_up);
  EXPECT_EQ(after(2, with(Pitfall::rollback_without_limit)), AnomalyDecision::roll_back);
  EXPECT_EQ(decide(config, findings, {.retried = true}).decision, AnomalyDecision::give_up);
}

TEST(Policy, ClipsToWhatIsUsualAndNeverEnlarges) {
  AnomalyConfig config;
  config.action = AnomalyAction::clip;
  const std::vector<AnomalyFinding> findings = {of(AnomalyMonitor::loss_spike)};
  const auto with_norm = [&](double norm, double usual) {
    return decide(config, findings, {.retried = true, .applied_norm = norm, .usual_norm = usual});
  };

  EXPECT_EQ(with_norm(8, 2).clip_factor, 0.25);
  EXPECT_EQ(with_norm(1, 2).clip_factor, 1.0);
  EXPECT_EQ(with_norm(8, 0).decision, AnomalyDecision::skip_step) << "nothing is known to clip to";
}

TEST(StepMonitor, SeesASpikeAndNoFall) {
  StepMonitor monitor({});
  for (int i = 0; i < 15; ++i) monitor.end_step(i, 3.0 + 0.01 * (i % 3), 1.0, true);
  EXPECT_TRUE(monitor.judge(15, 100, 100).empty()) << "fifteen values are too few";
  monitor.end_step(15, 3.0, 1.0, true);

  ASSERT_EQ(monitor.judge(16, 4.0, 1.0).size(), 1U);
  EXPECT_EQ(monitor.judge(16, 4.0, 1.0)[0].monitor, AnomalyMonitor::loss_spike);
  ASSERT_EQ(monitor.judge(16, 3.0, 30.0).size(), 1U);
  EXPECT_EQ(monitor.judge(16, 3.0, 30.0)[0].monitor, AnomalyMonitor::norm_spike);
  EXPECT_TRUE(monitor.judge(16, 0.01, 1e-6).empty());
}

TEST(StepMonitor, KeepsSpikesOutOfItsWindow) {
  StepMonitor monitor({}), planted({}, with(Pitfall::spike_enters_window));
  for (StepMonitor* one : {&monitor, &planted}) {
    for (int i = 0; i < 20; ++i) one->end_step(i, 3.0, 1.0, true);
    for (int i = 20; i < 50; ++i) one->end_step(i, 30.0, 1.0, false);
  }

  EXPECT_EQ(monitor.judge(50, 30.0, 1.0).size(), 1U);
  EXPECT_TRUE(planted.judge(50, 30.0, 1.0).empty()) << "the planted fault is not there";
}

TEST(StepMonitor, TakesALevelThatStaysForTheNewOne) {
  StepMonitor monitor({});
  for (int i = 0; i < 64; ++i) monitor.end_step(i, 3.0, 1.0, true);
  for (int i = 64; i < 128; ++i) monitor.end_step(i, 6.0, 1.0, false);
  for (int i = 128; i < 160; ++i) monitor.end_step(i, 6.0, 1.0, true);

  EXPECT_TRUE(monitor.judge(160, 6.1, 1.0).empty());
  EXPECT_FALSE(monitor.judge(160, 9.0, 1.0).empty());
}

TEST(StepMonitor, GoesBackWithTheRun) {
  AnomalyConfig config;
  config.window = 16;
  StepMonitor monitor(config);
  for (int i = 0; i < 16; ++i) monitor.end_step(i, 3.0, 2.0, true);
  for (int i = 16; i < 48; ++i) monitor.end_step(i, 9.0, 7.0, true);
  monitor.forget_before(16);
  EXPECT_EQ(monitor.since(14).first.size(), 34U) << "the window of the steps before is still needed";

  monitor.forget_from(16);

  EXPECT_NEAR(monitor.median_norm(), 2.0, 1e-12);
  EXPECT_FALSE(monitor.judge(16, 9.0, 2.0).empty());
  EXPECT_EQ(monitor.since(12).first, std::vector<double>(4, 3.0));
}

// A loss that falls steeply at first, then with relative noise of Student's t with 4 degrees of freedom (infinite kurtosis), and
// lognormal norms that now and then are several times as large.
TEST(StepMonitor, IsSilentOverTenThousandNoisySteps) {
  for (const unsigned seed : {1U, 2U, 3U, 4U, 5U}) {
    std::mt19937_64 random(seed);
    std::student_t_distribution<double> heavy(4);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    StepMonitor monitor({});
    int alarms = 0;
    for (int step = 0; step < 10000; ++step) {
      const double loss = (2.0 + 3.0 * std::exp(-step / 30.0)) * std::max(0.2, 1 + 0.06 * std::clamp(heavy(random), -8.0, 8.0));
      const double norm = std::exp(0.4 * normal(random)) * (uniform(random) < 0.01 ? 4 : 1) * (1 + 4 * std::exp(-step / 50.0));
      alarms += static_cast<int>(monitor.judge(step, loss, norm).size());
      monitor.end_step(step, loss, norm, true);
    }
    EXPECT_EQ(alarms, 0) << "seed " << seed;
  }
}

TEST(ScaleMonitor, TellsACollapseFromACalibration) {
  ScaleMonitor monitor(64);
  double scale = std::ldexp(1.0, 30);
  for (int step = 0; step < 14; ++step, scale /= 2) EXPECT_FALSE(monitor.see(step, scale, true)) << "it only began too high";
  for (int step = 14; step < 20; ++step) EXPECT_FALSE(monitor.see(step, scale, false));
  int found = 0;
  for (int step = 20; step < 34; ++step, scale /= 2) found += monitor.see(step, scale, true).has_value() ? 1 : 0;

  EXPECT_EQ(found, 1);
  EXPECT_FALSE(monitor.see(34, 4.0, false));
  EXPECT_TRUE(monitor.see(35, 0.5, true)) << "below 1";
}

TEST(DriftMonitor, WantsALargeFactorForAWhile) {
  DriftMonitor monitor({.least = 8, .ratio = 4, .sustain = 3});
  std::vector<int> told;
  const auto see = [&](int at, double value) {
    if (monitor.see(value)) told.push_back(at);
  };
  for (int i = 0; i < 10; ++i) see(i, 1.0 + 0.01 * i);
  for (const double value : {50.0, 50.0, 1.0, 50.0, 50.0}) see(10, value);
  EXPECT_TRUE(told.empty()) << "two in a row are none";

  for (int i = 20; i < 23; ++i) see(i, 1.0);
  for (int i = 23; i < 30; ++i) see(i, 5.0);
  EXPECT_EQ(told, std::vector<int>{25}) << "at the third in a row, and once";
  see(30, 1.0);
  for (int i = 31; i < 40; ++i) see(i, 3.0);
  EXPECT_EQ(told.size(), 1U) << "a factor of three is no drift";
}

}  // namespace
}  // namespace tandem
