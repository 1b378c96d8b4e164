// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/lower.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "core/batch.h"

namespace tandem {
namespace {

GptConfig model_of_three_layers() {
  GptConfig model;
  model.layers = 3;
  return model;
}

TrainingPlan plan_of(int ranks, int micro_batches, std::int64_t bucket_bytes = 0) {
  TrainingPlan plan;
  plan.parallel.data = ranks;
  plan.batch = {11, micro_batches};
  plan.buckets.bucket_bytes = bucket_bytes;
  return plan;
}

std::vector<StepProgram> programs_of(const TrainingPlan& plan, const GptConfig& model) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < plan.parallel.world_size(); ++rank) programs.push_back(lower(plan, model, model.sequence, rank));
  return programs;
}

class Lower : public testing::TestWithParam<std::tuple<int, int, std::int64_t>> {};

TEST_P(Lower, MakesProgramsThatTheCheckerProves) {
  const auto [ranks, micro_batches, bucket_bytes] = GetParam();
  const GptConfig model = model_of_three_layers();
  const TrainingPlan plan = plan_of(ranks, micro_batches, bucket_bytes);

  const ProgramFacts facts = check_programs(programs_of(plan, model), expectation(plan, model, model.sequence));

  EXPECT_TRUE(facts.problems.empty()) << facts.problems.front();
}

INSTANTIATE_TEST_SUITE_P(RanksMicroBatchesBuckets, Lower,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7), testing::Values(1, 3), testing::Values(0, 1, 100000)));

TEST(Lower, CountsTheSameFlopsHoweverTheRowsAreDealt) {
  const GptConfig model = model_of_three_layers();
  const TrainingPlan alone = plan_of(1, 1);
  const double expected = check_programs(programs_of(alone, model), expectation(alone, model, model.sequence)).flops;

  for (const int ranks : {2, 3, 7}) {
    const TrainingPlan plan = plan_of(ranks, 3);
    EXPECT_DOUBLE_EQ(check_programs(programs_of(plan, model), expectation(plan, model, model.sequence)).flops, expected)
        << ranks << " ranks";
  }
}

TEST(Lower, CountsFlopsAsTheClosedFormDoes) {
  const GptConfig model = model_of_three_layers();
  const TrainingPlan plan = plan_of(1, 1);
  const double tokens = 11.0 * static_cast<double>(model.sequence);
  const double hidden = static_cast<double>(model.hidden);
  const double products = 3 * tokens * (2.0 * 3 * 12 * hidden * hidden + 2.0 * hidden * static_cast<double>(model.vocabulary));
  const double attention = 3 * 3 * 2 * tokens * hidden * static_cast<double>(model.sequence + 1);

  EXPECT_DOUBLE_EQ(check_programs(programs_of(plan, model), expectation(plan, model, model.sequence)).flops,
                   products + attention);
}

TEST(Lower, ReducesAsManyBytesAsThereAreGradientsWhateverTheBuckets) {
  const GptConfig model = model_of_three_layers();
  for (const std::int64_t bucket_bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{50000}}) {
    const TrainingPlan plan = plan_of(2, 1, bucket_bytes);
    const ProgramFacts facts = check_programs(programs_of(plan, model), expectation(plan, model, model.sequence));
    EXPECT_EQ(facts.gradient_bytes, 2 * 4 * num_parameters(model)) << bucket_bytes;
  }
}

// Of a table that is the head, too, a stage gets the gradient of what it does with it: the checker lets a bucket go no earlier.
TEST(Lower, ExpectsATiedTableToWaitForTheHeadWhereTheHeadIs) {
  using Sources = std::vector<int>;
  const GptConfig model = model_of_three_layers();
  const auto counts = [&](int pipeline, int rank, const Sources& sources) {
    TrainingPlan plan = plan_of(1, 2, 1);  // a bucket for each parameter
    plan.parallel.pipeline = pipeline;
    const std::vector<Sources> all =
        expectation(plan, model, model.sequence).ranks[static_cast<std::size_t>(rank)].bucket_sources;
    return std::ranges::count(all, sources);
  };
  ASSERT_TRUE(model.tied);
  EXPECT_EQ(counts(1, 0, {kHeadSource, kEmbeddingSource}), 1);
  EXPECT_EQ(counts(2, 0, {kEmbeddingSource}), 1);
  EXPECT_EQ(counts(2, 1, {kHeadSource}), 1);
}

// They write straight to where the experts read; only the way back has a buffer of its own.
TEST(Lower, AForwardPassHasNoRoomToExchangeTokensWhereEachRankHasAllExperts) {
  GptConfig model = model_of_three_layers();
  model.experts = 2;
  const auto room = [&](int data, int expert) {
    TrainingPlan plan = plan_of(data, 1);
    plan.parallel.expert = expert;
    plan.batch.rows = 11 * data;
    std::int64_t bytes = 0;
    for (const Operation& op : lower(plan, model, model.sequence, 0)) {
      const bool is_room = op.kind == OpKind::allocate && op.category == MemoryCategory::workspace;
      if (is_room && op.phase == Phase::forward) bytes += op.bytes;
    }
    return bytes;
  };
  EXPECT_EQ(room(2, 1), room(1, 1));
  EXPECT_GT(room(2, 2), room(1, 1));
}

}  // namespace
}  // namespace tandem
