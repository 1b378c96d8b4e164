// SPDX-License-Identifier: Apache-2.0
// The checker of step programs against faults that are planted where reductions are put into the backward pass.
#include <gtest/gtest.h>

#include "optimized/engine/lower.h"

namespace tandem {
namespace {

class OverlapFaults : public testing::TestWithParam<std::tuple<int, int, std::int64_t>> {
 protected:
  // zero stage, micro-batches, bucket size
  static ProgramFacts facts_with(const std::vector<Pitfall>& planted) {
    const auto [stage, micro_batches, bucket_bytes] = GetParam();
    GptConfig model;
    model.layers = 3;
    TrainingPlan plan;
    plan.parallel.data = 3;
    plan.batch = {11, micro_batches};
    plan.zero_stage = stage;
    plan.buckets.bucket_bytes = bucket_bytes;
    plan.overlap.gradients = true;
    const PitfallSet pitfalls(planted);
    std::vector<StepProgram> programs;
    for (int rank = 0; rank < 3; ++rank) programs.push_back(lower(plan, model, model.sequence, rank, pitfalls));
    return check_programs(programs, expectation(plan, model, model.sequence));
  }
};
INSTANTIATE_TEST_SUITE_P(Plans, OverlapFaults,
                         testing::Values(std::tuple(0, 1, 0), std::tuple(0, 2, 4), std::tuple(0, 3, 100000),
                                         std::tuple(1, 2, 0)));

TEST_P(OverlapFaults, ThereAreNoneInAProgramAsItShouldBe) { EXPECT_EQ(facts_with({}).problems, std::vector<std::string>()); }

TEST_P(OverlapFaults, ABucketSentBeforeItIsFilledIsFound) {
  const ProgramFacts facts = facts_with({Pitfall::bucket_sent_before_filled});
  ASSERT_FALSE(facts.problems.empty());
  EXPECT_NE(facts.problems.front().find("bucket"), std::string::npos) << facts.problems.front();
}

TEST_P(OverlapFaults, ANormThatDoesNotWaitForABucketIsFound) {
  const ProgramFacts facts = facts_with({Pitfall::wait_missing_before_norm});
  ASSERT_FALSE(facts.problems.empty());
  EXPECT_NE(facts.problems.front().find("norm"), std::string::npos) << facts.problems.front();
}

}  // namespace
}  // namespace tandem
