// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/shrink.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "core/batch.h"
#include "core/rng.h"

namespace tandem {
namespace {

GptConfig model_with_experts(int experts) {
  GptConfig model;
  model.layers = 8;
  model.heads = 4;
  model.hidden = 32;
  model.vocabulary = 64;
  model.sequence = 16;
  model.experts = experts;
  return model;
}

std::int64_t largest_micro_batch(const TrainingPlan& plan) {
  std::int64_t largest = 0;
  for (int rank = 0; rank < plan.parallel.data; ++rank) {
    for (int micro_batch = 0; micro_batch < plan.batch.micro_batches; ++micro_batch) {
      const Interval rows = micro_batch_rows(plan.batch.rows, plan.parallel.data, rank, plan.batch.micro_batches, micro_batch);
      largest = std::max(largest, rows.size());
    }
  }
  return largest;
}

void expect_every_row_dealt_once(const TrainingPlan& plan) {
  std::vector<int> dealt(static_cast<std::size_t>(plan.batch.rows));
  for (int rank = 0; rank < plan.parallel.data; ++rank) {
    for (int micro_batch = 0; micro_batch < plan.batch.micro_batches; ++micro_batch) {
      const Interval rows = micro_batch_rows(plan.batch.rows, plan.parallel.data, rank, plan.batch.micro_batches, micro_batch);
      for (std::int64_t row = rows.begin; row < rows.end; ++row) ++dealt[static_cast<std::size_t>(row)];
    }
  }
  EXPECT_EQ(std::count(dealt.begin(), dealt.end(), 1), plan.batch.rows);
}

// Whether some number of micro-batches up to one for each row makes a legal plan of this data degree that is not larger at once.
bool fits(TrainingPlan plan, const GptConfig& model, int data) {
  const std::int64_t most_rows = largest_micro_batch(plan);
  plan.parallel.data = data;
  const int end = static_cast<int>(plan.batch.rows) + plan.batch.micro_batches + plan.parallel.pipeline;
  for (plan.batch.micro_batches = 1; plan.batch.micro_batches <= end; ++plan.batch.micro_batches) {
    if (largest_micro_batch(plan) <= most_rows && conflicts(plan, model).empty()) return true;
  }
  return false;
}

struct Drawn {
  TrainingPlan plan;
  GptConfig model;
};

Drawn draw_plan(std::uint64_t seed) {
  CounterRng rng(seed, "shrink plans");
  const auto draw = [&](int below) { return static_cast<int>(rng.next_below(static_cast<std::uint64_t>(below))); };
  Drawn drawn;
  TrainingPlan& plan = drawn.plan;
  plan.parallel = {.data = 1 + draw(8), .tensor = 1 << draw(2), .pipeline = 1 << draw(2), .context = 1 << draw(2)};
  if (draw(3) == 0) plan.parallel.expert = 1 << draw(3);
  drawn.model = model_with_experts(plan.parallel.expert > 1 ? 4 : 0);
  plan.batch = {.rows = 1 + draw(40), .micro_batches = 1 + draw(5)};
  if (plan.parallel.pipeline > 1 && draw(2) == 0) plan.pipeline.chunks = 2;  // interleaved: rounds of micro-batches
  plan.zero_stage = draw(4);
  return drawn;
}

TEST(ShrinkPlan, KeepsTheBatchAndFitsTheRanksThatAreLeftForRandomPlans) {
  int shrunk = 0, with_rounds = 0, with_experts = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    const auto [plan, model] = draw_plan(seed);
    if (!conflicts(plan, model).empty()) continue;
    for (int ranks = 0; ranks <= plan.parallel.world_size(); ++ranks) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << ranks << " ranks");
      const std::optional<TrainingPlan> smaller = shrink_plan(plan, model, ranks);
      const int most = std::min(plan.parallel.data, ranks / (plan.parallel.world_size() / plan.parallel.data));
      int largest = most;
      while (largest > 0 && !fits(plan, model, largest)) --largest;
      ASSERT_EQ(smaller.has_value(), largest > 0);
      if (!smaller) continue;
      ASSERT_EQ(smaller->parallel.data, largest);
      ASSERT_NO_THROW(require_legal(*smaller, model));
      ASSERT_LE(largest_micro_batch(*smaller), largest_micro_batch(plan));
      ASSERT_GE(smaller->batch.micro_batches, plan.batch.micro_batches);
      ASSERT_NO_FATAL_FAILURE(expect_every_row_dealt_once(*smaller));
      TrainingPlan rest = *smaller;  // nothing else has changed, the rows of a step included
      rest.parallel.data = plan.parallel.data;
      rest.batch.micro_batches = plan.batch.micro_batches;
      ASSERT_EQ(rest, plan);
      shrunk += smaller->parallel.data < plan.parallel.data;
      with_rounds += smaller->parallel.data < plan.parallel.data && plan.pipeline.chunks == 2;
      with_experts += smaller->parallel.data < plan.parallel.data && plan.parallel.expert > 1;
    }
  }
  EXPECT_GT(shrunk, 500);
  EXPECT_GT(with_rounds, 20);
  EXPECT_GT(with_experts, 20);
}

TEST(ShrinkPlan, GoesFromFourToThreeToTwoRanksWithMoreAccumulation) {
  const GptConfig model = model_with_experts(0);
  TrainingPlan plan;
  plan.parallel.data = 4;
  plan.batch = {.rows = 8, .micro_batches = 1};
  const auto three = shrink_plan(plan, model, 3);
  ASSERT_TRUE(three.has_value());
  EXPECT_EQ(three->parallel.data, 3);
  EXPECT_EQ(three->batch, (GlobalBatch{.rows = 8, .micro_batches = 2}));
  const auto two = shrink_plan(*three, model, 2);
  ASSERT_TRUE(two.has_value());
  EXPECT_EQ(two->batch, (GlobalBatch{.rows = 8, .micro_batches = 2}));
}

TEST(ShrinkPlan, KeepsWholeExpertGroups) {
  const GptConfig model = model_with_experts(4);
  TrainingPlan plan;
  plan.parallel = {.data = 8, .expert = 4};
  const auto smaller = shrink_plan(plan, model, 7);
  ASSERT_TRUE(smaller.has_value());
  EXPECT_EQ(smaller->parallel.data, 4);
  EXPECT_FALSE(shrink_plan(plan, model, 3).has_value());
}

TEST(ShrinkPlan, IsNothingWhereNoReplicaFits) {
  TrainingPlan plan;
  plan.parallel = {.data = 2, .tensor = 2, .pipeline = 2};
  EXPECT_FALSE(shrink_plan(plan, model_with_experts(0), 3).has_value());
  EXPECT_TRUE(shrink_plan(plan, model_with_experts(0), 4).has_value());
}

TEST(ShrinkPlan, ShrinksTheBatchWithEachPitfallInItsOwnWay) {
  TrainingPlan plan;
  plan.parallel.data = 4;
  plan.batch = {.rows = 10, .micro_batches = 1};
  const auto with = [&](Pitfall pitfall) {
    return shrink_plan(plan, model_with_experts(0), 3, PitfallSet(std::span(&pitfall, 1)))->batch;
  };
  EXPECT_EQ(with(Pitfall::shrink_keeps_accumulation), (GlobalBatch{.rows = 7, .micro_batches = 1}));
  EXPECT_EQ(with(Pitfall::departed_samples_forgotten), (GlobalBatch{.rows = 8, .micro_batches = 2}));
}

}  // namespace
}  // namespace tandem
