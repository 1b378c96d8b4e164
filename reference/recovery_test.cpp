// SPDX-License-Identifier: Apache-2.0
#include "reference/recovery.h"

#include <map>
#include <set>

#include <gtest/gtest.h>

#include "core/error.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

HeardBeat heard(double seconds, int rank, std::uint64_t progress, RunPhase phase = RunPhase::train, bool waiting = false) {
  HeardBeat result{seconds, {}};
  result.beat.rank = rank;
  result.beat.progress = progress;
  result.beat.step = static_cast<std::int64_t>(progress);
  result.beat.phase = phase;
  result.beat.waiting = waiting;
  return result;
}

StallLimits limits_of_train(double seconds) {
  StallLimits limits;
  limits.stall_seconds[static_cast<std::size_t>(RunPhase::train)] = seconds;
  return limits;
}

// Two ranks that advance every second until `end`.
std::vector<HeardBeat> steady(double end) {
  std::vector<HeardBeat> trace;
  for (double t = 1; t < end; ++t) {
    for (int rank = 0; rank < 2; ++rank) trace.push_back(heard(t, rank, static_cast<std::uint64_t>(t)));
  }
  return trace;
}

TEST(RecoveryStalls, AreNoneWhereAllAdvance) {
  const StallList list = stalls(steady(20), 2, 0, 20, limits_of_train(5));
  EXPECT_TRUE(list.stalls.empty());
  EXPECT_DOUBLE_EQ(list.silence_margin_seconds, 2.5) << "beats are a second apart";
  EXPECT_DOUBLE_EQ(list.stall_margin_seconds, 4);
  StallLimits late = limits_of_train(5);
  late.stall_seconds[static_cast<std::size_t>(RunPhase::start)] = 10;
  EXPECT_EQ(stalls({}, 1, 0, 9, late).stalls.size(), 0U);
  EXPECT_EQ(stalls({}, 1, 0, 11, late).stalls.size(), 1U);
}

TEST(RecoveryStalls, TellSilenceFromStandstill) {
  std::vector<HeardBeat> trace = steady(10);
  for (double t = 10; t < 20; ++t) trace.push_back(heard(t, 1, 9));  // rank 0 is silent, rank 1 gets nothing done
  const StallList list = stalls(trace, 2, 0, 20, limits_of_train(5));
  const std::vector<Stall> expected = {{0, StallKind::dead, 9, RunPhase::train, 12.5},
                                       {1, StallKind::hung, 9, RunPhase::train, 14}};
  EXPECT_EQ(list.stalls, expected);
}

TEST(RecoveryStalls, ExcuseWhoWaitsUnlessAllDo) {
  std::vector<HeardBeat> trace = steady(10);
  std::vector<HeardBeat> deadlock = trace;
  for (double t = 10; t < 20; ++t) {
    trace.push_back(heard(t, 0, 9, RunPhase::train, true));
    trace.push_back(heard(t, 1, 9));
    deadlock.push_back(heard(t, 0, 9, RunPhase::train, true));
    deadlock.push_back(heard(t, 1, 9, RunPhase::train, true));
  }
  const std::vector<Stall> one = {{1, StallKind::hung, 9, RunPhase::train, 14}};
  EXPECT_EQ(stalls(trace, 2, 0, 20, limits_of_train(5)).stalls, one);
  EXPECT_EQ(stalls(deadlock, 2, 0, 20, limits_of_train(5)).stalls.size(), 2U);
}

TEST(RecoveryStalls, HaveALimitInEachPhaseAndAreReportedEachTime) {
  std::vector<HeardBeat> trace;
  std::uint64_t progress = 0;
  for (double t = 1; t < 60; ++t) {
    const bool saves = t >= 10 && t < 20;
    const bool stuck = saves || (t >= 30 && t < 38) || (t >= 45 && t < 53);
    if (!stuck || t == 10) ++progress;
    trace.push_back(heard(t, 0, progress, saves ? RunPhase::checkpoint : RunPhase::train));
  }
  StallLimits limits = limits_of_train(5);
  limits.stall_seconds[static_cast<std::size_t>(RunPhase::checkpoint)] = 30;
  const std::vector<Stall> expected = {{0, StallKind::hung, 29, RunPhase::train, 34},
                                       {0, StallKind::hung, 44, RunPhase::train, 49}};
  EXPECT_EQ(stalls(trace, 1, 0, 60, limits).stalls, expected);
}

TEST(RecoveryStalls, PatienceGrowsWithThePaceThatWasSurvived) {
  std::vector<HeardBeat> trace;
  std::uint64_t progress = 0;
  for (double t = 1; t < 60; ++t) {
    const bool stuck = (t >= 10 && t < 14) || (t >= 30 && t < 38);
    progress += stuck ? 0 : 1;
    trace.push_back(heard(t, 0, progress));
  }
  StallLimits limits = limits_of_train(6);
  EXPECT_EQ(stalls(trace, 1, 0, 60, limits).stalls.size(), 1U);
  limits.patience = 3;  // of the four seconds for which its beats showed the same
  EXPECT_TRUE(stalls(trace, 1, 0, 60, limits).stalls.empty());
}

TEST(RecoveryStragglers, AreSlowInTheirOwnWork) {
  const std::vector<double> step(8, 1.0);
  const std::vector<double> usual(8, 0.4);
  std::vector<double> slow(8, 0.9);
  EXPECT_EQ(stragglers({usual, slow, usual}, step, {}), std::vector<int>{1});
  slow.assign(8, 0.59);  // beyond neither
  EXPECT_TRUE(stragglers({usual, slow, usual}, step, {}).empty());
  slow = {0.4, 0.4, 0.4, 0.4, 0.4, 9, 9, 9};  // three steps are no habit
  EXPECT_TRUE(stragglers({usual, slow, usual}, step, {}).empty());
}

TEST(RecoveryLedger, DoesAgainWhatCameAfterTheNewestCheckpoint) {
  const ExecutionLedger ledger = execute({8, {{3, true}}, {5, 6}});
  EXPECT_EQ(ledger.begins, (std::vector<std::int64_t>{0, 3, 6}));
  EXPECT_EQ(ledger.lost_steps, 2);
  ASSERT_EQ(ledger.steps.size(), 10U);
  const ExecutedStep lost{0, 4, false};
  EXPECT_EQ(ledger.steps[4], lost);
  std::map<std::int64_t, int> counted;
  for (const ExecutedStep& step : ledger.steps) counted[step.step] += step.counts ? 1 : 0;
  EXPECT_EQ(counted.size(), 8U);
  for (const auto& [step, times] : counted) EXPECT_EQ(times, 1) << "step " << step;
}

TEST(RecoveryLedger, ATierThatDiesWithTheWorkersSavesNothing) {
  EXPECT_EQ(execute({10, {{4, true}, {1, true}}, {7}}).lost_steps, 0);
  EXPECT_EQ(execute({10, {{4, true}, {1, false}}, {7}}).lost_steps, 3);
  EXPECT_EQ(execute({10, {}, {7}}).lost_steps, 7);
  EXPECT_EQ(execute({10, {{3, true, {1}}}, {7}}).lost_steps, 4) << "the newest is damaged";
}

TEST(RecoveryTime, AddsUpByHand) {
  // Steps end at 1, 2; saved by 2.5; step 2 until 3.5; broken off at 4; down until 6; steps 2 and 3 at 7 and 8.
  const TimeLedger ledger = account({1, 0.5, 2, 2, 4}, {4, 100});
  EXPECT_DOUBLE_EQ(ledger.wall_seconds, 8);
  EXPECT_DOUBLE_EQ(ledger.useful_seconds, 4);
  EXPECT_DOUBLE_EQ(ledger.redone_seconds, 1);
  EXPECT_DOUBLE_EQ(ledger.broken_seconds, 0.5);
  EXPECT_DOUBLE_EQ(ledger.save_seconds, 0.5);
  EXPECT_DOUBLE_EQ(ledger.down_seconds, 2);
  EXPECT_EQ(ledger.lost_steps, 1);
  EXPECT_EQ(ledger.failures, 1);
}

TEST(RecoveryTime, AFailureDuringARestartBeginsItAnew) {
  const TimeLedger ledger = account({1, 0, 2, 1, 3}, {1.5, 2.5});
  EXPECT_DOUBLE_EQ(ledger.down_seconds, 3);
  EXPECT_DOUBLE_EQ(ledger.wall_seconds, 6.5);
  EXPECT_EQ(ledger.failures, 2);
}

TEST(RecoveryDealing, GivesEachSampleOnceWhateverTheRanks) {
  const std::vector<DealtSample> dealt = deal(11, {4, 3, 2, 2, 4}, {1, 2, 2, 3, 1});
  ASSERT_EQ(dealt.size(), 55U);
  std::set<std::int64_t> places;
  for (const DealtSample& sample : dealt) {
    EXPECT_EQ(sample.place / 11, sample.step);
    EXPECT_TRUE(places.insert(sample.place).second);
  }
  EXPECT_EQ(fewest_micro_batches(11, 4, 3), 1);
  EXPECT_EQ(fewest_micro_batches(11, 3, 3), 2);
  EXPECT_EQ(fewest_micro_batches(11, 1, 3), 4);
}

TrainingRun small_run() {
  TrainingRun run;
  run.model = {.vocabulary = 11, .sequence = 6, .layers = 1, .hidden = 8, .heads = 2, .mlp_hidden = 12};
  run.model.residual_dropout = 0.2;
  run.steps = 6;
  run.schedule = {ScheduleKind::cosine, 2, 5, 0.1};
  run.initialization = Initialization::scattered;
  run.numerics.storage = DType::f16;
  run.loss_scale.mode = "dynamic";
  run.loss_scale.initial = 1024;
  run.loss_scale.growth_interval = 2;
  run.batch = [model = run.model](std::int64_t step) {
    return ragged_batch(model, 6, {6, 1, 4}, static_cast<std::uint64_t>(step));
  };
  return run;
}

TEST(ColdRestart, IsTheUndisturbedRun) {
  const TrainingRun run = small_run();
  const TrainingRecord<float> undisturbed = train<float>(run);

  auto state = initial_state<float>(run);
  std::vector<double> losses = go_on(run, state, 3);
  const auto saved = state;
  (void)go_on(run, state, 5);  // lost
  auto restarted = saved;
  for (const double loss : go_on(run, restarted, 6)) losses.push_back(loss);

  EXPECT_EQ(losses, undisturbed.losses);
  EXPECT_EQ(restarted.parameters, undisturbed.parameters);
  EXPECT_EQ(restarted.optimizer.m, undisturbed.optimizer.m);
  EXPECT_EQ(restarted.optimizer.v, undisturbed.optimizer.v);
  EXPECT_EQ(restarted.scaler.scale(), undisturbed.loss_scale);
  EXPECT_EQ(restarted.scaler.growth_tracker(), undisturbed.growth_tracker);
}

TEST(ColdRestart, NeedsEveryField) {
  const TrainingRun run = small_run();
  auto state = initial_state<float>(run);
  (void)go_on(run, state, 3);
  const auto fresh = initial_state<float>(run);
  const auto end_of = [&](auto changed) {
    (void)go_on(run, changed, 6);
    return changed.parameters;
  };
  const auto truth = end_of(state);
  auto changed = state;
  changed.optimizer.m = fresh.optimizer.m;
  EXPECT_NE(end_of(changed), truth);
  changed = state;
  changed.optimizer.v = fresh.optimizer.v;
  EXPECT_NE(end_of(changed), truth);
  changed = state;
  changed.optimizer.updates = 0;
  EXPECT_NE(end_of(changed), truth);
  changed = state;
  changed.next_step = 2;
  EXPECT_NE(end_of(changed), truth);
  changed = state;
  changed.scaler = fresh.scaler;
  (void)go_on(run, changed, 6);
  (void)go_on(run, state, 6);
  EXPECT_NE(changed.scaler.scale(), state.scaler.scale());
}

}  // namespace
}  // namespace tandem::reference
