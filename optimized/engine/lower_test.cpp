// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/lower.h"

#include <algorithm>
#include <string>

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
  for (int rank = 0; rank < plan.parallel.data; ++rank) programs.push_back(lower(plan, model, model.sequence, rank));
  return programs;
}

bool finds(const std::vector<StepProgram>& programs, const TrainingPlan& plan, const std::string& text) {
  const ProgramFacts facts = check_programs(programs, expectation(plan, model_of_three_layers()));
  return std::any_of(facts.problems.begin(), facts.problems.end(),
                     [&](const std::string& problem) { return problem.find(text) != std::string::npos; });
}

template <class Predicate>
StepProgram::iterator find_operation(StepProgram& program, const Predicate& predicate) {
  return std::find_if(program.begin(), program.end(), predicate);
}

bool is_reduction(const Operation& op) { return op.kind == OpKind::communicate && op.purpose == Purpose::gradient; }

class Lower : public testing::TestWithParam<std::tuple<int, int, std::int64_t>> {};

TEST_P(Lower, MakesProgramsThatTheCheckerProves) {
  const auto [ranks, micro_batches, bucket_bytes] = GetParam();
  const GptConfig model = model_of_three_layers();
  const TrainingPlan plan = plan_of(ranks, micro_batches, bucket_bytes);

  const ProgramFacts facts = check_programs(programs_of(plan, model), expectation(plan, model));

  EXPECT_TRUE(facts.problems.empty()) << facts.problems.front();
}

INSTANTIATE_TEST_SUITE_P(RanksMicroBatchesBuckets, Lower,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7), testing::Values(1, 3), testing::Values(0, 1, 100000)));

TEST(Lower, CountsTheSameFlopsHoweverTheRowsAreDealt) {
  const GptConfig model = model_of_three_layers();
  const TrainingPlan alone = plan_of(1, 1);
  const double expected = check_programs(programs_of(alone, model), expectation(alone, model)).flops;

  for (const int ranks : {2, 3, 7}) {
    const TrainingPlan plan = plan_of(ranks, 3);
    EXPECT_DOUBLE_EQ(check_programs(programs_of(plan, model), expectation(plan, model)).flops, expected) << ranks << " ranks";
  }
}

TEST(Lower, CountsFlopsAsTheClosedFormDoes) {
  const GptConfig model = model_of_three_layers();
  const TrainingPlan plan = plan_of(1, 1);
  const double tokens = 11.0 * static_cast<double>(model.sequence);
  const double hidden = static_cast<double>(model.hidden);
  const double products = 3 * tokens * (2.0 * 3 * 12 * hidden * hidden + 2.0 * hidden * static_cast<double>(model.vocabulary));
  const double attention = 3 * 3 * 2 * tokens * hidden * static_cast<double>(model.sequence + 1);

  EXPECT_DOUBLE_EQ(check_programs(programs_of(plan, model), expectation(plan, model)).flops, products + attention);
}

TEST(Lower, ReducesAsManyBytesAsThereAreGradientsWhateverTheBuckets) {
  const GptConfig model = model_of_three_layers();
  for (const std::int64_t bucket_bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{50000}}) {
    const TrainingPlan plan = plan_of(2, 1, bucket_bytes);
    const ProgramFacts facts = check_programs(programs_of(plan, model), expectation(plan, model));
    EXPECT_EQ(facts.gradient_bytes, 2 * 4 * num_parameters(model)) << bucket_bytes;
  }
}

TEST(ProgramChecker, FindsAMissingBackward) {
  const TrainingPlan plan = plan_of(2, 2);
  auto programs = programs_of(plan, model_of_three_layers());
  auto found = find_operation(programs[1], [](const Operation& op) {
    return op.kind == OpKind::compute && op.phase == Phase::backward_weight && op.layer == 1 && op.micro_batch == 1;
  });
  found->kind = OpKind::gradient_norm;

  EXPECT_TRUE(finds(programs, plan, "rank 1: backward_weight h.1 mb 1 appears 0 times"));
}

TEST(ProgramChecker, FindsABackwardThatRunsTooEarly) {
  const TrainingPlan plan = plan_of(1, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  const auto layer_input = [&](int layer) {
    return find_operation(programs[0], [layer](const Operation& op) {
      return op.kind == OpKind::compute && op.phase == Phase::backward_input && op.layer == layer;
    });
  };
  std::swap(layer_input(2)->layer, layer_input(0)->layer);

  EXPECT_TRUE(finds(programs, plan, "runs before"));
}

TEST(ProgramChecker, FindsABucketThatIsNeverReduced) {
  const TrainingPlan plan = plan_of(2, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  for (StepProgram& program : programs) find_operation(program, is_reduction)->purpose = Purpose::other;

  EXPECT_TRUE(finds(programs, plan, "gradient bucket 0 is reduced 0 times"));
}

TEST(ProgramChecker, FindsAReductionThatDoesNotWaitForTheLastMicroBatch) {
  const TrainingPlan plan = plan_of(2, 2);
  auto programs = programs_of(plan, model_of_three_layers());
  find_operation(programs[0], is_reduction)->after = {0};

  EXPECT_TRUE(finds(programs, plan, "does not wait for a backward_weight of the last micro-batch"));
}

TEST(ProgramChecker, FindsANormThatDoesNotWaitForABucket) {
  const TrainingPlan plan = plan_of(2, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  find_operation(programs[0], [](const Operation& op) { return op.kind == OpKind::gradient_norm; })->after = {0};

  EXPECT_TRUE(finds(programs, plan, "the gradient norm does not wait"));
}

TEST(ProgramChecker, FindsMemoryThatIsNeverFreed) {
  const TrainingPlan plan = plan_of(1, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  programs[0].erase(find_operation(programs[0], [](const Operation& op) { return op.kind == OpKind::free; }));

  EXPECT_TRUE(finds(programs, plan, "never freed"));
}

TEST(ProgramChecker, FindsActivationsThatAreFreedBeforeTheirUse) {
  const TrainingPlan plan = plan_of(1, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  const auto of_layer = [&](OpKind kind) {
    return find_operation(programs[0], [kind](const Operation& op) {
      return op.kind == kind && op.category == MemoryCategory::activations && op.part == Part::block && op.layer == 1;
    });
  };
  std::rotate(of_layer(OpKind::allocate) + 1, of_layer(OpKind::free), of_layer(OpKind::free) + 1);

  EXPECT_TRUE(finds(programs, plan, "runs without its activations"));
}

TEST(ProgramChecker, FindsRanksThatCommunicateInAnotherOrder) {
  const TrainingPlan plan = plan_of(2, 1, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  auto first = find_operation(programs[1], is_reduction);
  std::swap(first->bucket, (first + 1)->bucket);
  std::swap(first->bytes, (first + 1)->bytes);

  EXPECT_TRUE(finds(programs, plan, "rank 1 does all_reduce bucket 1"));
}

TEST(ProgramChecker, FindsARankThatLeavesTheOthersWaiting) {
  const TrainingPlan plan = plan_of(3, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  programs[2].pop_back();

  EXPECT_TRUE(finds(programs, plan, "deadlock: rank 2 ends"));
}

TEST(ProgramChecker, FindsADependencyOnALaterOperation) {
  const TrainingPlan plan = plan_of(1, 1);
  auto programs = programs_of(plan, model_of_three_layers());
  programs[0][3].after = {7};

  EXPECT_TRUE(finds(programs, plan, "which is not before it"));
}

}  // namespace
}  // namespace tandem
