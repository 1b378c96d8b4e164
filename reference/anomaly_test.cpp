// SPDX-License-Identifier: Apache-2.0
#include "reference/anomaly.h"

#include <limits>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

using Fate = Computation::Fate;
using Kind = RunEvent::Kind;
using Cause = ScriptedAnomaly::Cause;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(ReferenceAnomaly, MedianIsTheMiddleOrTheMeanOfTheTwoInTheMiddle) {
  EXPECT_EQ(median_of({5, 1, 3}), 3);
  EXPECT_EQ(median_of({5, 1, 3, 2}), 2.5);
  EXPECT_EQ(median_of({7}), 7);
  EXPECT_THROW((void)median_of({}), ContractError);
}

TEST(ReferenceAnomaly, ZScoreCountsDeviationsFromTheMedianInRobustUnits) {
  // Median 3, deviations 2 1 0 1 97: their median is 1.
  EXPECT_DOUBLE_EQ(robust_z({1, 2, 3, 4, 100}, 3 + 14.826, 0), 10);
  EXPECT_DOUBLE_EQ(robust_z({1, 2, 3, 4, 100}, 3 - 14.826, 0), -10);
  EXPECT_DOUBLE_EQ(robust_z({1, 2, 3, 4, 100}, 9, 1), 2);  // the floor, 1 * 3, is wider
  EXPECT_EQ(robust_z({2, 2, 2}, 2, 0), 0);
  EXPECT_EQ(robust_z({2, 2, 2}, 2.5, 0), kInfinity);
  EXPECT_EQ(robust_z({1, 2, 3}, kNan, 0), kInfinity);
}

TEST(ReferenceAnomaly, SuspiciousValuesDoNotEnterTheWindow) {
  std::vector<double> series = {1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1};
  for (int i = 0; i < 12; ++i) series.push_back(9);
  const OutlierRule rule{.window = 8, .least = 4, .threshold = 12};

  const std::vector<std::size_t> found = suspicious_steps(series, rule);

  // A plateau never becomes the usual thing, however long it lasts.
  ASSERT_EQ(found.size(), 12);
  EXPECT_EQ(found.front(), 8);
  EXPECT_EQ(found.back(), 19);
}

TEST(ReferenceAnomaly, FewValuesJudgeNothingButWhatIsNotFinite) {
  const OutlierRule rule{.window = 8, .least = 4, .threshold = 12};
  EXPECT_EQ(suspicious_steps({1, 50, kNan, 2, 1}, rule), std::vector<std::size_t>{2});
}

TEST(ReferenceAnomaly, OldValuesLeaveTheWindow) {
  // The last four accepted lie about 5; against all eight, 6 would be close to the median.
  const std::vector<double> series = {1, 9, 1, 9, 5, 5.1, 4.9, 5, 6};
  EXPECT_EQ(suspicious_steps(series, {.window = 4, .least = 4, .threshold = 10}), std::vector<std::size_t>{8});
  EXPECT_TRUE(suspicious_steps(series, {.window = 8, .least = 4, .threshold = 10}).empty());
}

TEST(ReferenceAnomaly, StepsTakeTheBatchesThatAreLeft) {
  const std::set<std::int64_t> skipped = {0, 3, 4};
  EXPECT_EQ(batch_of(0, {}), 0);
  EXPECT_EQ(batch_of(0, skipped), 1);
  EXPECT_EQ(batch_of(1, skipped), 2);
  EXPECT_EQ(batch_of(2, skipped), 5);
  EXPECT_EQ(batch_of(9, skipped), 12);
}

TEST(ReferenceAnomaly, TheOddCopyIsTheOneThatDiffersFromMoreThanHalf) {
  EXPECT_EQ(odd_copies({7, 7, 7}), std::vector<int>{});
  EXPECT_EQ(odd_copies({7, 8, 7}), std::vector<int>{1});
  EXPECT_EQ(odd_copies({6, 7, 7, 8, 7}), (std::vector<int>{0, 3}));
  EXPECT_EQ(odd_copies({7, 8}), std::nullopt);
  EXPECT_EQ(odd_copies({7, 7, 8, 8}), std::nullopt);
}

TEST(ReferenceAnomaly, CheckpointsAreHealthyOnceTheStepsBehindThemWere) {
  std::vector<RunEvent> history = {{Kind::step, 0}, {Kind::save, 1}, {Kind::step, 1}, {Kind::save, 2}, {Kind::step, 2}};
  EXPECT_EQ(healthy_checkpoints(history, 2), std::set<std::int64_t>{1});
  EXPECT_EQ(healthy_checkpoints(history, 1), (std::set<std::int64_t>{1, 2}));

  history.push_back({Kind::finding, 3});
  history.push_back({Kind::step, 4});
  EXPECT_EQ(healthy_checkpoints(history, 2), std::set<std::int64_t>{1});
  history.push_back({Kind::step, 5});
  EXPECT_EQ(healthy_checkpoints(history, 2), (std::set<std::int64_t>{1, 2}));

  history.push_back({Kind::rolled_back, 1});
  EXPECT_EQ(healthy_checkpoints(history, 2), std::set<std::int64_t>{1});
}

PolicyRun run_with(AnomalyAction action, bool retry, const std::vector<ScriptedAnomaly>& anomalies) {
  PolicyRun run;
  run.policy.action = action;
  run.policy.retry = retry;
  run.policy.confirm_steps = 2;
  run.policy.max_rollbacks = 2;
  run.steps = 8;
  run.checkpoint_every_steps = 2;
  run.anomalies = anomalies;
  return run;
}

TEST(ReferenceAnomaly, ARetryRepairsWhatStrikesOnce) {
  const PolicyOutcome outcome = follow_policy(run_with(AnomalyAction::rollback, true, {{Cause::machine, 5, 1, false}}));

  ASSERT_EQ(outcome.computations.size(), 9);
  EXPECT_EQ(outcome.computations[5], (Computation{5, 5, Fate::retried}));
  EXPECT_EQ(outcome.computations[6], (Computation{5, 5, Fate::applied}));
  EXPECT_EQ(outcome.trained, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_TRUE(outcome.skipped.empty());
  EXPECT_EQ(outcome.healthy, (std::set<std::int64_t>{2, 4, 6}));
}

TEST(ReferenceAnomaly, ABadBatchIsRolledBackOnceAndLeftOut) {
  const PolicyOutcome outcome = follow_policy(run_with(AnomalyAction::rollback, true, {{Cause::data, 5}}));

  EXPECT_EQ(outcome.trained, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 6, 7, 8}));
  EXPECT_EQ(outcome.skipped, std::set<std::int64_t>{5});
  // The checkpoint of 4 steps has but one step behind it.
  EXPECT_EQ(outcome.rollbacks, (std::map<std::int64_t, std::int64_t>{{2, 1}}));
  EXPECT_EQ(outcome.computations[6], (Computation{5, 5, Fate::rolled_back}));
  EXPECT_EQ(outcome.computations[7], (Computation{2, 2, Fate::applied}));
  EXPECT_FALSE(outcome.gave_up);
}

TEST(ReferenceAnomaly, WhatReturnsWithEveryBatchIsGivenUp) {
  const PolicyOutcome outcome = follow_policy(run_with(AnomalyAction::rollback, false, {{Cause::machine, 5, 100}}));

  EXPECT_TRUE(outcome.gave_up);
  EXPECT_EQ(outcome.skipped, (std::set<std::int64_t>{5, 6}));
  EXPECT_EQ(outcome.rollbacks, (std::map<std::int64_t, std::int64_t>{{2, 2}}));
  EXPECT_EQ(outcome.computations.back(), (Computation{5, 7, Fate::gave_up}));
}

TEST(ReferenceAnomaly, CheaperActionsKeepTheOrderOfTheBatches) {
  const std::vector<std::int64_t> all = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<std::int64_t> without = all;
  without[5] = -1;
  EXPECT_EQ(follow_policy(run_with(AnomalyAction::report, false, {{Cause::data, 5}})).trained, all);
  EXPECT_EQ(follow_policy(run_with(AnomalyAction::skip, false, {{Cause::data, 5}})).trained, without);
  EXPECT_EQ(follow_policy(run_with(AnomalyAction::clip, false, {{Cause::data, 5}})).trained, all);
  EXPECT_EQ(follow_policy(run_with(AnomalyAction::clip, false, {{Cause::data, 5}})).computations[5].fate, Fate::clipped);
  EXPECT_EQ(follow_policy(run_with(AnomalyAction::clip, false, {{Cause::data, 5, 1, false}})).trained, without);
}

TEST(ReferenceAnomaly, AWrongStateIsLeftBehindAndNoBatchIsBlamed) {
  const PolicyOutcome outcome = follow_policy(run_with(AnomalyAction::skip, true, {{Cause::state, 5}}));
  EXPECT_EQ(outcome.trained, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(outcome.rollbacks, (std::map<std::int64_t, std::int64_t>{{2, 1}}));
  EXPECT_TRUE(outcome.skipped.empty());
  EXPECT_TRUE(follow_policy(run_with(AnomalyAction::report, true, {{Cause::state, 5}})).rollbacks.empty());
}

TEST(ReferenceAnomaly, ARunWithoutBatchesIsTheRunOnTheOthers) {
  TrainingRun run;
  run.batch = [](std::int64_t step) {
    Batch batch = make_batch(1, 1);
    batch.ids[0] = static_cast<std::int32_t>(step);
    return batch;
  };
  const TrainingRun shorter = without_batches(run, {1, 2});
  EXPECT_EQ(shorter.batch(0).ids[0], 0);
  EXPECT_EQ(shorter.batch(1).ids[0], 3);
}

}  // namespace
}  // namespace tandem::reference
