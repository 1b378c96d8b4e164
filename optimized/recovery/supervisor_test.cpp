// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/supervisor.h"

#include <atomic>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "optimized/recovery/supervisor_test_support.h"

namespace tandem {
namespace {

using End = SupervisorReport::End;
using Kinds = std::vector<std::string>;

TEST(Supervisor, ARunThatFinishesIsOneAttempt) {
  World world(std::vector<Script>(1));
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.end, End::finished);
  EXPECT_EQ(report.status, 0);
  EXPECT_EQ(report.attempts, 1U);
  EXPECT_EQ(report.failures, 0);
  EXPECT_EQ(world.kinds(), Kinds{"finished"});
  EXPECT_FALSE(world.attempts[0].resume);
  EXPECT_NEAR(report.wall_seconds, 22, 0.2);
  EXPECT_NEAR(report.useful_seconds, 19.5, 1);
  EXPECT_EQ(report.redone_seconds + report.down_seconds, 0);
}

TEST(Supervisor, AfterAnExitItGoesOnAndCountsWhatThatCosts) {
  const TestFolder folder;
  World world({{.does = Does::exit, .steps = 12, .end = {.signal = 9, .what = "killed by signal 9"}}, {.from = 10, .steps = 30}});
  world.options.backoff_seconds = 1;

  const SupervisorReport report = world.supervise(IncidentLog(folder.path()));

  EXPECT_EQ(report.end, End::finished);
  EXPECT_EQ(report.attempts, 2U);
  EXPECT_EQ(report.failures, 1);
  EXPECT_EQ(world.kills, 0);
  EXPECT_TRUE(world.attempts[1].resume);
  EXPECT_EQ(world.attempts[1].number, 1U);
  ASSERT_EQ(world.kinds(), (Kinds{"exit", "resumed", "finished"}));
  const Incident& failure = report.incidents[0];
  EXPECT_EQ(failure.what, "killed by signal 9");
  EXPECT_EQ(failure.action, "restart from step 10");
  EXPECT_GE(failure.step, 11);  // of the twelfth no beat may have told
  EXPECT_LE(*failure.detected_after_seconds, 1.2);
  EXPECT_EQ(*failure.lost_steps, failure.step - 10);
  EXPECT_EQ(report.lost_steps, *failure.lost_steps);
  EXPECT_NEAR(*failure.seconds_to_first_new_step, 1 + 2 + 1, 1.3);  // backoff, start, step, a beat

  EXPECT_NEAR(report.down_seconds, *failure.seconds_to_first_new_step, 1e-9);
  EXPECT_NEAR(report.redone_seconds, static_cast<double>(report.lost_steps - 1), 1);
  EXPECT_NEAR(report.useful_seconds, 30 - 2, 2.5);
  EXPECT_LE(report.useful_seconds + report.redone_seconds + report.down_seconds, report.wall_seconds);
  EXPECT_GT(report.goodput(), 0.7);

  const std::vector<Incident> read = read_incidents(folder.path());
  ASSERT_EQ(read.size(), 3U);
  EXPECT_EQ(read[1].kind, "resumed");
  EXPECT_EQ(read[1].lost_steps, failure.lost_steps);
  EXPECT_EQ(read[1].seconds_to_first_new_step, failure.seconds_to_first_new_step);
}

TEST(Supervisor, KnowsStepsThatNoBeatHasShown) {
  World world({{.does = Does::exit, .steps = 12}, {.from = 10}});
  world.options.detector.beat_seconds = 100;
  world.written_steps = 17;

  const SupervisorReport report = world.supervise();

  EXPECT_EQ(report.incidents[0].step, 17);
  EXPECT_EQ(report.lost_steps, 7);
}

TEST(Supervisor, HearsTheLastBeatOfWorkersThatHaveEnded) {
  World world({{.does = Does::exit, .steps = 12}, {.from = 10}});
  world.options.detector.beat_seconds = 8;
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.incidents[0].step, 12);
  EXPECT_EQ(report.lost_steps, 2);
}

TEST(Supervisor, KillsWhatHangsOrIsDeadAndNamesRankPhaseAndStep) {
  for (const Does does : {Does::hang, Does::fall_silent}) {
    World world({{.does = does, .steps = 5}, {.from = 3}});
    const SupervisorReport report = world.supervise();
    EXPECT_EQ(report.end, End::finished);
    EXPECT_EQ(world.kills, 1);
    const std::string kind = does == Does::hang ? "hung" : "dead";
    ASSERT_EQ(world.kinds(), (Kinds{kind, "resumed", "finished"}));
    const Incident& failure = report.incidents[0];
    EXPECT_EQ(failure.rank, 1);
    EXPECT_EQ(failure.step, 5);
    EXPECT_EQ(failure.phase, "train");
    EXPECT_EQ(failure.attempt, 0U);
    EXPECT_NEAR(*failure.detected_after_seconds, 3.6, 0.2);
    EXPECT_EQ(*failure.lost_steps, 2);
  }
}

TEST(Supervisor, WorkersThatEndWhileTheirFailureIsDetectedAreOneIncident) {
  int both = 0;
  for (int tenths = 20; tenths < 35; ++tenths) {
    World world({{.does = Does::fall_silent, .steps = 5, .ends_after_seconds = tenths / 10.0 - 0.05}, {.from = 3}});
    const SupervisorReport report = world.supervise();
    EXPECT_EQ(report.failures, 1);
    ASSERT_EQ(report.incidents.size(), 3U);
    const Incident& failure = report.incidents[0];
    const bool is_both = failure.what.find("the workers have ended: the machine broke") != std::string::npos;
    both += is_both ? 1 : 0;
    EXPECT_EQ(failure.rank, failure.kind == "exit" ? -1 : 1);
    EXPECT_EQ(world.kills, failure.kind == "exit" || is_both ? 0 : 1);
  }
  EXPECT_GE(both, 1);
  EXPECT_LE(both, 2);
}

TEST(Supervisor, ASecondFailureDuringRecoveryIsOneMoreAndTheLossIsCountedOnce) {
  World world({{.does = Does::exit, .steps = 12}, {.does = Does::exit, .from = 10, .steps = 10}, {.from = 10}});
  world.options.backoff_seconds = 2;

  const SupervisorReport report = world.supervise();

  EXPECT_EQ(report.end, End::finished);
  EXPECT_EQ(report.failures, 2);
  ASSERT_EQ(world.kinds(), (Kinds{"exit", "exit", "resumed", "finished"}));
  EXPECT_EQ(*report.incidents[0].lost_steps + *report.incidents[1].lost_steps, report.lost_steps);
  EXPECT_EQ(report.lost_steps, report.incidents[0].step - 10);
  EXPECT_GT(*report.incidents[0].seconds_to_first_new_step, *report.incidents[1].seconds_to_first_new_step + 1.9);
  EXPECT_NEAR(report.down_seconds, *report.incidents[0].seconds_to_first_new_step, 1e-9);
  EXPECT_NEAR(world.started_at[1], 12 + 2 + 2, 0.5);
  EXPECT_NEAR(world.started_at[2], world.started_at[1] + 4, 0.5);  // the backoff has doubled
}

TEST(Supervisor, GivesUpWhenItsBudgetIsSpentWithoutANewStep) {
  World world({{.does = Does::exit, .steps = 12}, {.does = Does::exit, .from = 10, .steps = 12}});
  world.options.max_restarts = 3;

  const SupervisorReport report = world.supervise();

  EXPECT_EQ(report.end, End::gave_up);
  EXPECT_EQ(report.status, 4);
  EXPECT_EQ(report.attempts, 4U);
  EXPECT_EQ(report.failures, 4);
  EXPECT_NE(report.why.find("3 restarts in a row"), std::string::npos) << report.why;
  EXPECT_NE(report.why.find("the machine broke"), std::string::npos) << report.why;
  EXPECT_EQ(world.kinds().back(), "gave_up");
  EXPECT_EQ((world.said.end() - 2)->action, "give up");
}

TEST(Supervisor, ANewStepRefillsTheBudget) {
  std::vector<Script> scripts;
  for (std::int64_t step = 0; step < 50; step += 5) scripts.push_back({.does = Does::exit, .from = step, .steps = step + 8});
  scripts.push_back({.from = 50, .steps = 60});
  World world(scripts);
  world.options.max_restarts = 1;
  EXPECT_EQ(world.supervise().end, End::finished);
}

TEST(Supervisor, StopsDuringBackoff) {
  World world({{.does = Does::exit, .steps = 2}});
  world.options.backoff_seconds = 1000;
  world.options.longest_backoff_seconds = 1000;
  world.stop_at_seconds = 50;
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.end, End::interrupted);
  EXPECT_EQ(report.attempts, 1U);
  EXPECT_LT(report.wall_seconds, 51);
  EXPECT_EQ(world.kinds(), (Kinds{"exit", "preempted"}));
}

TEST(Supervisor, AsksToSaveWhenItIsStoppedAndKillsOnlyWhatDoesNotListen) {
  for (const bool ignores : {false, true}) {
    World world({{.steps = 1000, .ignores_terminate = ignores}});
    world.options.terminate_seconds = 30;
    world.stop_at_seconds = 10;
    const SupervisorReport report = world.supervise();
    EXPECT_EQ(report.end, End::interrupted);
    EXPECT_EQ(world.terminations, 1);
    EXPECT_EQ(world.kills, ignores ? 1 : 0);
    EXPECT_EQ(report.status, ignores ? 137 : 130);
    EXPECT_FALSE(world.is_running);
    EXPECT_NEAR(report.wall_seconds, ignores ? 40 : 11, 0.3);
    EXPECT_EQ(report.failures, 0);
    EXPECT_NE(report.why.find(ignores ? "killed" : "saved"), std::string::npos) << report.why;
  }
}

TEST(Supervisor, WorkersThatFinishWhenTheyAreAskedToEndHaveFinished) {
  for (const bool replaces : {false, true}) {
    World world({{.does = Does::be_slow, .steps = 40, .when_terminated = {.status = 0}}});
    world.options.replace_slow = replaces;
    if (!replaces) world.stop_at_seconds = 10;
    const SupervisorReport report = world.supervise();
    EXPECT_EQ(report.end, End::finished);
    EXPECT_EQ(report.status, 0);
    EXPECT_EQ(report.attempts, 1U);
    EXPECT_EQ(world.terminations, 1);
  }
}

TEST(Supervisor, StartsNothingWhenItIsStoppedBefore) {
  World world(std::vector<Script>(1));
  world.stop = true;
  EXPECT_EQ(world.supervise().end, End::interrupted);
  EXPECT_TRUE(world.attempts.empty());
}

TEST(Supervisor, BadInputIsNotTriedAgainButADamagedStateIs) {
  const WorkerEnd bad = {.status = 2, .what = "config.json: no such key"};
  World first({{.does = Does::exit, .steps = 0, .end = bad}});
  const SupervisorReport report = first.supervise();
  EXPECT_EQ(report.end, End::bad_input);
  EXPECT_EQ(report.status, 2);
  EXPECT_EQ(report.attempts, 1U);
  EXPECT_EQ(report.why, bad.what);

  World second({{.does = Does::exit, .steps = 3}, {.does = Does::exit, .from = 2, .steps = 2, .end = bad}, {.from = 0}});
  EXPECT_EQ(second.supervise().end, End::finished);
  EXPECT_EQ(second.attempts.size(), 3U);
}

TEST(Supervisor, AWorkerThatWasPreemptedIsNotStartedAgain) {
  World world({{.does = Does::exit, .steps = 3, .end = {.status = 130, .what = "saved at step 3"}}});
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.end, End::interrupted);
  EXPECT_EQ(report.status, 130);
  EXPECT_EQ(world.kinds(), Kinds{"preempted"});
}

TEST(Supervisor, KnowsWhatItsWorkersHaveSaidAlready) {
  const auto said = [](const WorkerEnd& end) {
    World world({{.does = Does::exit, .end = end}, {}});
    (void)world.supervise();
    EXPECT_EQ(world.said.front().what, end.what);
    return world.said.front().said;
  };
  for (const int status : {4, 130}) {
    EXPECT_TRUE(said({.status = status, .what = "the disk is full", .said = true}));
    EXPECT_FALSE(said({.status = status, .what = "ended with a status"}));
  }
}

TEST(Supervisor, ARunThatHasGivenItselfUpIsNotStartedAgain) {
  World world({{.does = Does::exit, .steps = 3, .end = {.status = kHopelessStatus, .what = "rolled back too often"}}});
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.end, End::gave_up);
  EXPECT_EQ(report.attempts, 1U);
  EXPECT_EQ(report.why, "rolled back too often");
}

TEST(Supervisor, AttemptsThatCannotBeStartedCountToo) {
  World world(std::vector{Script{.refuses_to_start = true}});
  world.options.max_restarts = 2;
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.end, End::gave_up);
  EXPECT_EQ(report.attempts, 3U);
  EXPECT_NE(report.why.find("no more processes"), std::string::npos) << report.why;
}

TEST(Supervisor, GoesOnWithFewerRanksOnlyWhereItMay) {
  for (const bool may : {true, false}) {
    World world({{.does = Does::exit, .steps = 12}, {.from = 10}}, 4);
    world.options.shrink = may;
    world.lost = {{2}};
    const SupervisorReport report = world.supervise();
    EXPECT_EQ(report.end, End::finished);
    ASSERT_EQ(world.attempts.size(), 2U);
    EXPECT_EQ(world.attempts[1].plan.parallel.world_size(), may ? 3 : 4);
    EXPECT_EQ(world.attempts[1].plan.batch.rows, 12);
    EXPECT_EQ(report.incidents[0].action, may ? "shrink to 3 ranks, restart from step 10" : "restart from step 10");
  }
}

TEST(Supervisor, GivesUpWhereTooFewRanksAreLeft) {
  for (const int least : {1, 3}) {
    World world({{.does = Does::exit, .steps = 12}, {.from = 10}}, 4);
    world.options.shrink = true;
    world.options.least_ranks = least;
    world.lost = {least == 1 ? std::vector{0, 1, 2, 3} : std::vector{0, 1}};
    const SupervisorReport report = world.supervise();
    EXPECT_EQ(report.end, End::gave_up);
    EXPECT_EQ(report.attempts, 1U);
    EXPECT_NE(report.why.find("ranks that are left"), std::string::npos) << report.why;
  }
}

TEST(Supervisor, AStragglerIsNamedAndReplacedOnlyOnRequest) {
  for (const bool replaces : {false, true}) {
    World world({{.does = Does::be_slow, .steps = 40}, {.from = 20, .steps = 40}});
    world.options.replace_slow = replaces;
    world.stop_at_seconds = replaces ? 1e9 : 60;
    const SupervisorReport report = world.supervise();
    const Incident& incident = report.incidents.at(0);
    EXPECT_EQ(incident.kind, "slow");
    EXPECT_EQ(incident.rank, 1);
    EXPECT_EQ(incident.phase, "train");
    EXPECT_EQ(world.kills, 0);
    EXPECT_EQ(report.end, replaces ? End::finished : End::interrupted);
    EXPECT_EQ(incident.action, replaces ? "restart from step 20" : "none");
    EXPECT_EQ(report.attempts, replaces ? 2U : 1U);
    EXPECT_EQ(world.terminations, 1);
  }
}

TEST(Supervisor, LateBeatsOfAnOldAttemptAreNotItsOwn) {
  World world({{.does = Does::exit, .steps = 12}, {.does = Does::hang, .from = 10, .steps = 14}, {.from = 10}});
  world.has_late_beats = true;
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.end, End::finished);
  ASSERT_EQ(world.kinds(), (Kinds{"exit", "resumed", "hung", "resumed", "finished"}));
  EXPECT_EQ(report.incidents[2].step, 14);
  EXPECT_EQ(*report.incidents[2].lost_steps, 4);
}

TEST(Supervisor, AnAttemptThatGoesFurtherBackThanExpectedHasLostMore) {
  World world({{.does = Does::exit, .steps = 12}, {.from = 4}});
  world.expects_wrong_step = true;
  const SupervisorReport report = world.supervise();
  EXPECT_EQ(report.lost_steps, 15 - 4);
  EXPECT_NEAR(report.redone_seconds, 15 - 4 - 1, 0.1);
}

TEST(Supervisor, ALogThatCannotBeWrittenIsSaidOnceAndTheRunGoesOn) {
  const TestFolder folder;
  IncidentLog log(folder.path());
  std::filesystem::remove(log.file());
  std::filesystem::create_directory(log.file());
  World world({{.does = Does::exit, .steps = 12}, {.from = 10}});
  const SupervisorReport report = world.supervise(log);
  EXPECT_EQ(report.end, End::finished);
  EXPECT_EQ(world.kinds(), (Kinds{"log", "exit", "resumed", "finished"}));
}

TEST(Supervisor, LeavesNoWorkerBehindWhateverThrows) {
  World world(std::vector<Script>(1));
  world.options.detector.beat_seconds = 1;
  std::atomic<bool> stop{false};
  IncidentLog log("");
  EXPECT_THROW(static_cast<void>(supervise(
                   world.options, world, world, log, stop, {}, [&] { return world.now_ns; },
                   [](double) { throw std::runtime_error("interrupted"); })),
               std::runtime_error);
  EXPECT_FALSE(world.is_running);
  EXPECT_EQ(world.kills, 1);
}

}  // namespace
}  // namespace tandem
