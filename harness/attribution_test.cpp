// SPDX-License-Identifier: Apache-2.0
#include "harness/attribution.h"

#include <gtest/gtest.h>

#include "harness/made_up_results.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::made_up_file;
using tandem::testing::made_up_result;

// Milliseconds of one step. Communication is busy for `hidden + exposed`.
struct Step {
  double compute = 100, hidden = 30, exposed = 10, data = 3, checkpoint = 2, idle = 5;
};

CaseResult result_of(const Step& step, const std::string& name = "a/b") {
  const double total = step.compute + step.exposed + step.data + step.checkpoint + step.idle;
  std::vector<double> samples;
  for (const double noise : {0.999, 1.001, 1.0, 0.998, 1.002}) samples.push_back(1e-3 * total * noise);
  CaseResult result = made_up_result(name, Status::pass, samples);
  Measurements& measured = *result.measurements;
  measured.compute_share = step.compute / total;
  measured.busy_share = (step.hidden + step.exposed) / total;
  measured.exposed_share = step.exposed / total;
  measured.data_share = step.data / total;
  measured.checkpoint_share = step.checkpoint / total;
  measured.idle_share = step.idle / total;
  return result;
}

Attribution gap(const Step& a, const Step& b) {
  return attribute_gap(made_up_file({result_of(a)}), made_up_file({result_of(b)}));
}

double share(const Attribution& attribution, Cause cause) {
  for (const CauseShare& part : attribution.causes) {
    if (part.cause == cause) return part.share;
  }
  return -1;
}

TEST(Attribution, NamesEachPlantedCauseWithTheWholeGap) {
  const struct {
    Cause cause;
    Step b;
    double milliseconds;
  } planted[] = {
      {Cause::compute, {.compute = 150}, 50},
      {Cause::link, {.exposed = 70}, 60},                  // busy 100 in place of 40, no more of it hidden
      {Cause::link, {.hidden = 75, .exposed = 25}, 15},    // busy 100, the same share of it hidden
      {Cause::overlap, {.hidden = 0, .exposed = 40}, 30},  // the same busy time, none of it hidden
      {Cause::storage, {.data = 43}, 40},
      {Cause::storage, {.checkpoint = 42}, 40},
      {Cause::unexplained, {.idle = 45}, 40},
  };
  for (const auto& plant : planted) {
    const Attribution found = gap({}, plant.b);
    EXPECT_EQ(found.verdict, plant.cause) << found.sentence;
    EXPECT_NEAR(share(found, plant.cause), 1, 1e-9) << found.sentence;
    EXPECT_NEAR(found.causes.front().seconds, 1e-3 * plant.milliseconds, 1e-9) << found.sentence;
    // The other way round it is as much faster for the same reason.
    EXPECT_EQ(gap(plant.b, {}).verdict, plant.cause) << gap(plant.b, {}).sentence;
  }
}

TEST(Attribution, TheGapIsTheSumOfItsParts) {
  const Attribution found = gap({}, {.compute = 120, .hidden = 5, .exposed = 75, .data = 13, .checkpoint = 0, .idle = 9});
  double seconds = 0, shares = 0;
  for (const CauseShare& part : found.causes) {
    seconds += part.seconds;
    shares += part.share;
  }
  EXPECT_NEAR(seconds, found.seconds_b - found.seconds_a, 1e-12);
  EXPECT_NEAR(shares, 1, 1e-12);
  // busy 80 in place of 40; with A's overlap between 30 and 60 of it would be hidden, and 5 are: 25 ms less than at least.
  EXPECT_NEAR(share(found, Cause::overlap) * 1e3 * seconds, 25, 1e-9);
  EXPECT_NEAR(share(found, Cause::link) * 1e3 * seconds, 40, 1e-9);
}

TEST(Attribution, FasterComputingThatHidesLessIsNoLossOfOverlap) {
  const Attribution found = gap({.compute = 100, .hidden = 30, .exposed = 10}, {.compute = 40, .hidden = 15, .exposed = 25});
  EXPECT_EQ(found.verdict, Cause::compute);
  EXPECT_NEAR(share(found, Cause::overlap), 0, 1e-12);
}

TEST(Attribution, SeveralCasesAreSummed) {
  const Attribution found = attribute_gap(made_up_file({result_of({}, "a/1"), result_of({}, "a/2"), result_of({}, "only/a")}),
                                          made_up_file({result_of({.compute = 140}, "a/1"), result_of({.data = 13}, "a/2")}));
  EXPECT_EQ(found.cases, 2);
  EXPECT_NEAR(share(found, Cause::compute), 0.8, 1e-9);
  EXPECT_NEAR(share(found, Cause::storage), 0.2, 1e-9);
  EXPECT_TRUE(has(found.sentence, "80 % of the gap is computing (1.20 x), 20 % data and checkpoints")) << found.sentence;
}

TEST(Attribution, SaysWhenThereIsNoGapOrNothingToSplit) {
  const Attribution none = gap({}, {.compute = 100.05});
  EXPECT_EQ(none.verdict, Cause::unexplained);
  EXPECT_TRUE(has(none.sentence, "no gap that stands out")) << none.sentence;
  ResultFile unsplit = made_up_file({made_up_result("a/b")});
  EXPECT_EQ(attribute_gap(unsplit, unsplit).cases, 0) << "a run without spans";
}

TEST(Attribution, ThreadsAndOverlapMayDifferAndNothingElse) {
  const CaseResult a = result_of({});
  CaseResult b = a;
  b.plan.overlap.gradients = !b.plan.overlap.gradients;
  b.plan.threads_per_rank += 1;
  EXPECT_TRUE(same_work(a, b));
  b.plan.batch.rows += 1;
  EXPECT_FALSE(same_work(a, b));
}

}  // namespace
}  // namespace tandem
