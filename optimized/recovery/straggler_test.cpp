// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optimized/recovery/failure_detector.h"

namespace tandem {
namespace {

/// Seconds of own work of a rank in a step.
using Work = std::function<double(int rank, int step)>;

struct Conditions {
  double communication_seconds = 0.1;
  RunPhase work_phase = RunPhase::train;
  bool beats_alternate = false;  ///< of odd ranks half a beat later
  PitfallSet pitfalls = {};
};

/// Ranks in step with each other: each step takes what the slowest takes, and communication. A rank that is ready waits for the
/// others. A beat a second, a check every half.
std::vector<RankEvent> train(int ranks, int steps, const Work& work, const Conditions& conditions = {}) {
  DetectorOptions options;
  options.ranks = ranks;
  options.pitfalls = conditions.pitfalls;
  FailureDetector detector(options);
  std::vector<RankEvent> events;
  std::vector<Heartbeat> beats(static_cast<std::size_t>(ranks));
  std::vector<double> done_seconds(beats.size());
  double now = 1;
  int half_beats = 2;
  detector.begin_attempt(0, ranks, 1'000'000'000);
  for (int step = 0; step < steps; ++step) {
    std::vector<double> own;
    for (int rank = 0; rank < ranks; ++rank) own.push_back(work(rank, step));
    const double end = now + *std::max_element(own.begin(), own.end()) + conditions.communication_seconds;
    for (; half_beats * 0.5 < end; ++half_beats) {
      const auto now_ns = std::int64_t{half_beats} * 500'000'000;
      for (std::size_t rank = 0; rank < beats.size(); ++rank) {
        if (half_beats % 2 != (conditions.beats_alternate ? static_cast<int>(rank) % 2 : 0)) continue;
        Heartbeat& beat = beats[rank];
        beat.rank = static_cast<int>(rank);
        ++beat.sequence;
        ++beat.progress;
        const double worked_seconds = std::min(own[rank], half_beats * 0.5 - now);
        beat.busy_ns = static_cast<std::int64_t>((done_seconds[rank] + worked_seconds) * 1e9);
        beat.waiting = worked_seconds == own[rank];
        beat.phase = beat.waiting ? RunPhase::train : conditions.work_phase;
        detector.hear(beat, now_ns);
      }
      for (const RankEvent& event : detector.check(now_ns)) events.push_back(event);
    }
    now = end;
    for (std::size_t rank = 0; rank < beats.size(); ++rank) {
      done_seconds[rank] += own[rank];
      ++beats[rank].step;
    }
  }
  return events;
}

std::string told(const std::vector<RankEvent>& events) {
  std::string text;
  for (const RankEvent& event : events) {
    text += (text.empty() ? "" : ", ") + std::to_string(event.rank) + " " + std::string(name(event.state));
  }
  return text;
}

Work noisy(double seconds, double noise, std::uint64_t seed) {
  return [=, random = std::mt19937_64(seed)](int, int) mutable {
    return seconds * std::uniform_real_distribution(1 - noise, 1 + noise)(random);
  };
}

TEST(Straggler, IsNamedWithItsPhaseWhateverAStepTakes) {
  for (const double seconds : {0.02, 0.3, 0.9, 1.3, 4.0}) {
    SCOPED_TRACE(seconds);
    const auto work = [&](int rank, int step) { return seconds * (rank == 2 && step >= 20 ? 2 : 1); };
    const int steps = 60 + static_cast<int>(20 / seconds);
    const std::vector<RankEvent> events =
        train(4, steps, work, {.communication_seconds = seconds / 10, .work_phase = RunPhase::data});
    ASSERT_EQ(told(events), "2 slow");
    EXPECT_EQ(events[0].phase, RunPhase::data);
    EXPECT_NEAR(events[0].value, 2, 0.5);  // a beat sees a part of a step
    EXPECT_EQ(events[0].limit, 1.5);
    EXPECT_GT(events[0].detected_after_seconds, 2);
    EXPECT_NE(events[0].describe().find("rank 2 is slow in data at step "), std::string::npos);
  }
}

TEST(Straggler, IsNamedAmongNoiseWithinSixteenSteps) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    Work noise = noisy(1, 0.3, seed);
    const auto work = [&](int rank, int step) { return noise(rank, step) * (rank == 0 && step >= 30 ? 2.2 : 1); };
    const std::vector<RankEvent> events = train(3, 60, work);
    ASSERT_EQ(told(events), "0 slow") << seed;
    EXPECT_GE(events[0].step, 30) << seed;
    EXPECT_LE(events[0].step, 46) << seed;
  }
}

TEST(Straggler, ComparedByWallTimeIsNotFound) {
  const auto work = [](int rank, int step) { return rank == 2 && step >= 20 ? 2.0 : 1.0; };
  EXPECT_EQ(told(train(4, 100, work, {.pitfalls = PitfallSet(std::array{Pitfall::straggler_by_wall_time})})), "");
}

TEST(Straggler, IsNotFoundInNoise) {
  for (const int ranks : {2, 4}) EXPECT_EQ(told(train(ranks, 10'000, noisy(0.8, 0.3, 5))), "") << ranks;
}

TEST(Straggler, IsNotFoundWhereBeatsSeePartsOfSteps) {
  for (const double seconds : {0.9, 1.3, 1.4, 1.6, 2.4}) {
    const Conditions conditions = {.communication_seconds = 0.1, .beats_alternate = true};
    EXPECT_EQ(told(train(2, 3000, noisy(seconds, 0.1, 7), conditions)), "") << seconds;
  }
}

TEST(Straggler, IsNoRankThatWorksNoMoreThanTheOthersOnTheWhole) {
  const auto work = [](int rank, int step) { return rank == 0 ? (step % 8 < 5 ? 17.0 : 2.0) : 10.0; };
  EXPECT_EQ(told(train(3, 200, work)), "");
}

TEST(Straggler, IsNoRankWithARareLongStep) {
  // One that writes checkpoints, say.
  const auto work = [](int rank, int step) { return rank == 1 && step % 6 == 0 ? 8.0 : 1.0; };
  EXPECT_EQ(told(train(3, 500, work)), "");
}

TEST(Straggler, IsNoRankThatHardlyMakesTheStepLonger) {
  const auto work = [](int rank, int) { return rank == 0 ? 0.2 : 0.1; };
  EXPECT_EQ(told(train(3, 100, work, {.communication_seconds = 0.1})), "0 slow");
  EXPECT_EQ(told(train(3, 100, work, {.communication_seconds = 1})), "");
}

TEST(Straggler, NeedsAnotherRank) {
  const auto work = [](int, int step) { return step < 50 ? 1.0 : 5.0; };
  EXPECT_EQ(told(train(1, 100, work)), "");
}

TEST(Straggler, IsToldAgainWhenItHasBeenWellInBetween) {
  const auto work = [](int rank, int step) { return rank == 1 && step % 60 >= 30 ? 2.0 : 1.0; };
  EXPECT_EQ(told(train(3, 130, work)), "1 slow, 1 alive, 1 slow, 1 alive");
}

}  // namespace
}  // namespace tandem
