// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/failure_detector.h"

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/recovery/failure_detector_test_support.h"

namespace tandem {
namespace {

PitfallSet with(Pitfall pitfall) { return PitfallSet(std::array{pitfall}); }

/// Goes through random phases of random length; now and then gets stuck in one.
class RandomRank {
 public:
  RandomRank(std::uint64_t seed, Heartbeat& beat) : random_(seed), beat_(beat) { enter(RunPhase::start); }

  void tick(const FailureDetector& detector) {
    left_seconds_ -= kTickSeconds;
    to_progress_seconds_ -= kTickSeconds;
    if (to_progress_seconds_ > 0) return;
    if (left_seconds_ <= 0) {
      next_phase();
    } else {
      ++beat_.progress;
      if (beat_.phase == RunPhase::train) ++beat_.step;
    }
    to_progress_seconds_ = beat_.phase == RunPhase::train ? uniform(0.3, 2.4) : left_seconds_;
    if (uniform(0, 1) < (beat_.phase == RunPhase::train ? 0.005 : 0.05) && beat_.step > 2) get_stuck(detector);
  }
  int stalls = 0;

 private:
  double uniform(double low, double high) { return std::uniform_real_distribution(low, high)(random_); }
  void enter(RunPhase phase) {
    const std::array<double, kRunPhases> longest = {100, 250, 45, 60, 100, 100, 0};
    beat_.phase = phase;
    ++beat_.progress;
    left_seconds_ = uniform(1, longest[static_cast<std::size_t>(phase)]);
    to_progress_seconds_ = left_seconds_;
  }
  void next_phase() {
    switch (beat_.phase) {
      case RunPhase::start: return enter(RunPhase::restore);
      case RunPhase::train: return enter(std::array{RunPhase::checkpoint, RunPhase::evaluate, RunPhase::data}[random_() % 3]);
      default: return enter(RunPhase::train);
    }
  }
  // Beats show progress late, by up to three of them where two are lost.
  void get_stuck(const FailureDetector& detector) {
    to_progress_seconds_ = 1.2 * detector.stall_limit_seconds(beat_.phase) + 5;
    ++stalls;
  }

  std::mt19937_64 random_;
  Heartbeat& beat_;
  double left_seconds_ = 0, to_progress_seconds_ = 0;
};

struct Verdict {
  int stalls = 0, told = 0, well_again = 0, others = 0;
};

Verdict live_through(std::uint64_t seed, double seconds, const PitfallSet& pitfalls = {}) {
  DetectorOptions options;
  options.pitfalls = pitfalls;
  constexpr int kRanks = 3;
  Fleet fleet(kRanks, options);
  std::vector<RandomRank> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(seed * 100 + static_cast<std::uint64_t>(rank), fleet.at(rank));
  std::mt19937_64 random(seed);
  std::array<double, kRanks> heard_again{};
  fleet.run(seconds, [&] {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      ranks[i].tick(fleet.detector());
      if (fleet.now_seconds() < heard_again[i] || random() % 50 != 0) continue;
      fleet.lost[i] = 1 + static_cast<int>(random() % 2);
      heard_again[i] = fleet.now_seconds() + 4;
    }
  });
  Verdict verdict;
  for (const RandomRank& rank : ranks) verdict.stalls += rank.stalls;
  for (const RankEvent& event : fleet.events) {
    if (event.state == RankState::hung) ++verdict.told;
    if (event.state == RankState::alive) ++verdict.well_again;
    if (event.state == RankState::dead || event.state == RankState::slow) ++verdict.others;
  }
  // One that is under way at the end may not have been told yet, or not be over.
  for (int rank = 0; rank < kRanks; ++rank) verdict.well_again += fleet.detector().state(rank) == RankState::hung ? 1 : 0;
  return verdict;
}

TEST(FailureDetector, TellsEveryStallOnceAndNothingElseInRandomPhases) {
  int stalls = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    const Verdict verdict = live_through(seed, 5000);
    EXPECT_LE(verdict.told, verdict.stalls);
    EXPECT_GE(verdict.told, verdict.stalls - 3);
    EXPECT_EQ(verdict.well_again, verdict.told);
    EXPECT_EQ(verdict.others, 0);
    stalls += verdict.told;
  }
  EXPECT_GT(stalls, 100);
}

TEST(FailureDetector, WithOneLimitForAllPhasesRaisesFalseAlarms) {
  const Verdict verdict = live_through(1, 2000, with(Pitfall::one_limit_for_all_phases));
  EXPECT_GT(verdict.told, verdict.stalls);
}

TEST(FailureDetector, WithAnEventNeverClearedMissesTheSecondStall) {
  const Verdict verdict = live_through(1, 5000, with(Pitfall::reported_rank_never_cleared));
  EXPECT_EQ(verdict.told, 3);
  EXPECT_GT(verdict.stalls, 6);
}

TEST(FailureDetector, ARankThatFallsSilentIsDeadWithinFourBeats) {
  Fleet fleet(3);
  fleet.warm_up();
  fleet.is_silent[1] = true;
  const double begin = fleet.now_seconds();
  double told_by = 0;

  fleet.run(5, [&] {
    for (const int rank : {0, 2}) ++fleet.at(rank).progress;
    if (fleet.events.empty()) told_by = fleet.now_seconds() - begin;
  });

  ASSERT_EQ(fleet.told(), "1 dead");
  EXPECT_LE(told_by, 4);
  EXPECT_EQ(fleet.events[0].step, 3);
  EXPECT_EQ(fleet.events[0].phase, RunPhase::train);
  EXPECT_NEAR(fleet.events[0].detected_after_seconds, 3.6, 0.11);
  EXPECT_EQ(fleet.events[0].limit, 3.5);
  EXPECT_EQ(fleet.detector().state(1), RankState::dead);
  EXPECT_EQ(fleet.events[0].describe(), "rank 1 is dead: not heard of for 3.6 s (limit 3.5 s), last in train at step 4");
}

TEST(FailureDetector, ADeadRankThatIsHeardAgainIsToldAndItsSecondDeathToo) {
  Fleet fleet(2);
  fleet.warm_up();
  const auto work = [&] { fleet.step(); };
  for (int i = 0; i < 2; ++i) {
    fleet.is_silent[0] = true;
    fleet.run(5, work);
    fleet.is_silent[0] = false;
    fleet.run(5, work);
  }
  EXPECT_EQ(fleet.told(), "0 dead, 0 alive, 0 dead, 0 alive");
}

TEST(FailureDetector, OneOrTwoLostBeatsAreNoDeathThreeAndAHalfAre) {
  for (const int lost : {1, 2, 4}) {
    Fleet fleet(2);
    fleet.warm_up();
    fleet.lost[1] = lost;
    fleet.run(10, [&] { fleet.step(); });
    EXPECT_EQ(fleet.told(), lost < 3 ? "" : "1 dead, 1 alive") << lost;
  }
}

TEST(FailureDetector, ARankIsNotBlamedForAPauseOfTheSupervisor) {
  Fleet fleet(2);
  fleet.warm_up();
  const auto work = [&] { fleet.step(); };
  fleet.run(4, work);

  for (const double seconds : {1.5, 10.0, 3600.0}) {
    fleet.pause(seconds);
    fleet.run(10, work);
  }
  EXPECT_EQ(fleet.told(), "");

  fleet.pause(100);
  fleet.is_silent[1] = true;
  fleet.run(4.5, work);
  EXPECT_EQ(fleet.told(), "1 dead");
}

TEST(FailureDetector, AStallBesideAPauseOfTheSupervisorIsTold) {
  Fleet fleet(2);
  fleet.warm_up();
  fleet.at(0).waiting = true;
  fleet.run(1);
  fleet.pause(1000);
  fleet.run(5);
  EXPECT_EQ(fleet.told(), "1 hung");
  EXPECT_LT(fleet.events.at(0).value, 4);
}

TEST(FailureDetector, AHangIsBlamedOnTheRankThatDoesNotWait) {
  for (const bool is_planted : {false, true}) {
    DetectorOptions options;
    if (is_planted) options.pitfalls = with(Pitfall::waiting_rank_taken_for_hung);
    Fleet fleet(4, options);
    fleet.warm_up();
    for (const int rank : {0, 1, 3}) fleet.at(rank).waiting = true;
    fleet.run(5);
    if (is_planted) {
      EXPECT_EQ(fleet.events.size(), 4U);
      continue;
    }
    ASSERT_EQ(fleet.told(), "2 hung");
    EXPECT_NEAR(fleet.events[0].detected_after_seconds, 3.6, 0.11);
    EXPECT_EQ(fleet.events[0].describe(), "rank 2 hangs in train at step 4: nothing done for 3.6 s (limit 3.5 s)");
    fleet.step();
    for (Heartbeat& beat : fleet.beats) beat.waiting = false;
    fleet.run(2);
    EXPECT_EQ(fleet.told(), "2 hung, 2 alive");
  }
}

TEST(FailureDetector, WhereAllWaitAllAreBlamedButThoseThatHaveFinished) {
  Fleet fleet(3);
  fleet.warm_up();
  for (Heartbeat& beat : fleet.beats) beat.waiting = true;
  fleet.at(1).phase = RunPhase::finished;
  fleet.is_silent[1] = false;
  fleet.run(1);
  fleet.is_silent[1] = true;
  fleet.run(6);
  EXPECT_EQ(fleet.told(), "0 hung, 2 hung");
}

TEST(FailureDetector, ARankThatWaitsForADeadOneIsNotHung) {
  // The last beat of the one that died may say that it waits, too.
  for (const bool dies_waiting : {false, true}) {
    for (int ticks = 0; ticks < kTicksPerBeat; ++ticks) {
      Fleet fleet(3);
      fleet.warm_up();
      fleet.run(ticks * kTickSeconds);
      for (const int rank : {0, 2}) fleet.at(rank).waiting = true;
      fleet.at(1).waiting = dies_waiting;
      fleet.run(1);
      fleet.is_silent[1] = true;
      fleet.run(10);
      EXPECT_EQ(fleet.told(), "1 dead") << dies_waiting << ticks;
    }
  }
}

TEST(FailureDetector, TheLimitOfTrainFollowsThePace) {
  Fleet fleet(1);
  const double of_start = fleet.detector().stall_limit_seconds(RunPhase::start);
  fleet.enter(RunPhase::train);
  EXPECT_EQ(fleet.detector().stall_limit_seconds(RunPhase::train), of_start);
  fleet.run(1);
  fleet.step();
  fleet.run(1);
  EXPECT_EQ(fleet.detector().stall_limit_seconds(RunPhase::train), 3.5);

  for (int i = 0; i < 5; ++i) {
    fleet.step();
    fleet.run(3);
  }
  const double adapted = fleet.detector().stall_limit_seconds(RunPhase::train);
  EXPECT_NEAR(adapted, 20, 0.01);  // three beats showed the same, so that it was surely two seconds
  fleet.run(15);
  EXPECT_EQ(fleet.told(), "");

  // Beyond its limit it is a fault, not a pace, and in another attempt the pace is the same.
  const double before = fleet.detector().stall_limit_seconds(RunPhase::train);
  fleet.step();
  fleet.run(before * 10 + 200);
  fleet.step();
  fleet.run(3);
  EXPECT_EQ(fleet.told(), "0 hung, 0 alive");
  const double after = fleet.detector().stall_limit_seconds(RunPhase::train);
  EXPECT_NEAR(after, 180, 11);
  fleet.detector().begin_attempt(1, 1, fleet.now_ns());
  EXPECT_EQ(fleet.detector().stall_limit_seconds(RunPhase::train), after);
}

TEST(FailureDetector, TheFirstStepOfEachAttemptMayTakeAsLongAsStarting) {
  Fleet fleet(2);
  fleet.warm_up();
  fleet.detector().begin_attempt(1, 2, fleet.now_ns());
  for (Heartbeat& beat : fleet.beats) beat.attempt = 1;
  fleet.enter(RunPhase::train);
  fleet.run(100);
  EXPECT_EQ(fleet.told(), "");
  fleet.run(30);
  EXPECT_EQ(fleet.told(), "1 hung, 0 hung");
}

TEST(FailureDetector, WhoseBeatTellsOfALongFirstStepLastIsNotHung) {
  DetectorOptions options;
  options.ranks = 2;
  options.patience = 0;
  FailureDetector detector(options);
  std::array<Heartbeat, 2> beats;
  const auto hear = [&](int rank, double seconds) {
    Heartbeat& beat = beats[static_cast<std::size_t>(rank)];
    beat.rank = rank;
    beat.phase = RunPhase::train;
    ++beat.sequence;
    detector.hear(beat, static_cast<std::int64_t>(seconds * 1e9));
  };
  std::string told;
  const auto check = [&](double seconds) {
    for (const RankEvent& event : detector.check(static_cast<std::int64_t>(seconds * 1e9))) told += event.describe() + "\n";
  };
  for (int second = 1; second <= 40; ++second) {
    hear(0, second);
    hear(1, second + 0.5);
    check(second + 0.75);
  }
  beats[0].step = beats[1].step = 1;
  hear(0, 41);
  check(41.25);
  EXPECT_EQ(told, "") << "rank 1 is heard a quarter of a second later";
  hear(1, 41.5);
  for (int second = 42; second <= 60; ++second) {
    hear(0, second);
    hear(1, second + 0.5);
    check(second + 0.75);
  }
  EXPECT_NE(told.find("rank 1 hangs in train"), std::string::npos) << "the usual limit holds from then on: " << told;
}

TEST(FailureDetector, WorkThatIsCountedEndsTheFirstStepHoweverFewBeatsSawIt) {
  Fleet fleet(2);
  fleet.warm_up();
  fleet.detector().begin_attempt(1, 2, fleet.now_ns());
  for (Heartbeat& beat : fleet.beats) {
    beat.attempt = 1;
    beat.busy_ns = 1;
  }
  fleet.enter(RunPhase::train);
  fleet.run(60);
  EXPECT_EQ(fleet.told(), "1 hung, 0 hung");
}

TEST(FailureDetector, ARankThatIsNeverHeardOfHasTheTimeOfAStart) {
  Fleet fleet(2);
  fleet.is_silent[1] = true;
  fleet.run(119, [&] { ++fleet.at(0).progress; });
  EXPECT_EQ(fleet.told(), "");
  fleet.run(3, [&] { ++fleet.at(0).progress; });
  EXPECT_EQ(fleet.told(), "1 dead");
}

TEST(FailureDetector, ARankThatHasFinishedMayBeSilent) {
  Fleet fleet(2);
  fleet.warm_up();
  fleet.enter(RunPhase::finished);
  fleet.run(2);
  fleet.is_silent = {true, true};
  fleet.run(1000);
  EXPECT_EQ(fleet.told(), "");
}

TEST(FailureDetector, WhatIsOfNoRankOfTheAttemptIsNotHeard) {
  FailureDetector detector({.ranks = 2});
  detector.begin_attempt(3, 2, 0);

  detector.hear({.attempt = 2, .rank = 0, .sequence = 9, .step = 70, .phase = RunPhase::train}, 1);
  detector.hear({.attempt = 3, .rank = 2, .sequence = 9, .step = 70, .phase = RunPhase::train}, 1);
  detector.hear({.attempt = 3, .rank = -1, .sequence = 9, .step = 70, .phase = RunPhase::train}, 1);
  EXPECT_EQ(detector.steps_done(), std::nullopt);

  detector.hear({.attempt = 3, .rank = 1, .sequence = 9, .step = 7, .phase = RunPhase::train}, 1);
  detector.hear({.attempt = 3, .rank = 1, .sequence = 8, .step = 5, .phase = RunPhase::train}, 1);
  EXPECT_EQ(detector.steps_done(), 7);

  detector.begin_attempt(4, 2, 2);
  EXPECT_EQ(detector.steps_done(), std::nullopt);
  EXPECT_THROW(static_cast<void>(detector.state(2)), ContractError);
  EXPECT_THROW(FailureDetector({.ranks = 0}), ContractError);
}

}  // namespace
}  // namespace tandem
