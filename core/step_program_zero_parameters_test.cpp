// SPDX-License-Identifier: Apache-2.0
// Parameters with ZeRO in check_programs().
#include <gtest/gtest.h>

#include "core/step_program.h"
#include "core/step_program_test_support.h"

namespace tandem {
namespace {

using namespace step_program_test;

constexpr auto kGradients = MemoryCategory::gradients;
constexpr auto kParameters = MemoryCategory::parameters;

TEST(ZeroParameters, FindsParametersThatAreNotGathered) {
  for (const auto& [bucket, text] : std::vector<std::pair<int, std::string>>{{2, "forward h.1 norm_1 mb 1"},
                                                                             {kFinalNorm, "forward head_norm mb 1"},
                                                                             {kPositions, "forward embedding mb 1"},
                                                                             {kTable, "forward embedding_lookup mb 1"}}) {
    World world = make_zero_world(kTwoReplicas, 3);
    erase_everywhere(world, is_of_bucket(OpKind::communicate, kParameters, bucket, 1));
    const std::string problem = text + " reads parameters of bucket " + std::to_string(bucket) + ", which are not gathered\n";
    EXPECT_EQ(all_problems(world), "rank 0: " + problem + "rank 1: " + problem);
  }
}

TEST(ZeroParameters, FindsAGatherAfterUseOrOneThatNobodyWaitsFor) {
  World late = make_zero_world(kTwoReplicas, 3);
  for (StepProgram& program : late.programs) {
    move_behind(program, is_of_bucket(OpKind::communicate, kParameters, 2, 0), is_compute(Phase::forward, Part::norm_1, 1, 0));
  }
  EXPECT_TRUE(reports(late, "rank 0: forward h.1 norm_1 mb 0 reads parameters of bucket 2, which are not gathered"));

  World unawaited = make_zero_world(kTwoReplicas, 3);
  StepProgram& program = unawaited.programs[1];
  const int first = find_operation(program, is_compute(Phase::forward, Part::norm_1, 1, 0));
  program[static_cast<std::size_t>(first)].after = {first - 2};
  EXPECT_EQ(all_problems(unawaited), "rank 1: forward h.1 norm_1 mb 0 does not wait for all_gather parameters bucket 2 mb 0\n");
}

TEST(ZeroParameters, FindsParametersThatAreFreedBeforeTheirLastUse) {
  World world = make_zero_world(kTwoReplicas, 3);
  for (StepProgram& program : world.programs) {
    move_before(program, is_of_bucket(OpKind::free, kParameters, 2, 0), is_compute(Phase::forward, Part::mlp, 1, 0));
  }
  EXPECT_TRUE(reports(world, "rank 0: forward h.1 mlp mb 0 reads parameters of bucket 2, which are not allocated"));
}

TEST(ZeroParameters, AsksForExpertsOnlyWhereTheyAreRead) {
  const WorldShape shape{.degrees = {.data = 4, .expert = 2}, .experts = true};
  World world = make_zero_world(shape, 3);  // buckets 0 and 1: experts and dense parameters of layer 3
  erase_everywhere(world, is_of_bucket(OpKind::communicate, kParameters, 0, 0));

  EXPECT_TRUE(reports(world, "rank 3: forward h.3 experts mb 0 reads parameters of bucket 0, which are not gathered"));
}

TEST(ZeroParameters, AsksForParametersOfWhatIsComputedAgain) {
  World world = make_zero_world(kTwoReplicas, 3);
  Operation again;
  again.phase = Phase::recompute;
  again.part = Part::norm_1;
  again.layer = 2;
  again.micro_batch = 1;
  for (StepProgram& program : world.programs) {
    const int at = find_operation(program, is_of_bucket(OpKind::allocate, kGradients, 1, 1));  // its parameters are freed then
    program.insert(program.begin() + at, again);
    chain(program);
  }
  EXPECT_TRUE(reports(world, "rank 0: recompute h.2 norm_1 mb 1 reads parameters of bucket 1, which are not allocated"));
}

TEST(ZeroParameters, FindsGathersAfterTheOptimizerInStage3AndTheirAbsenceBefore) {
  World three = make_zero_world(kTwoReplicas, 3);
  for (StepProgram& program : three.programs) {
    Operation gather = the(program, is_of_bucket(OpKind::communicate, kParameters, 0, 0));
    gather.micro_batch = -1;
    program.push_back(gather);
    chain(program);
  }
  EXPECT_TRUE(reports(three, "rank 0: all_gather parameters bucket 0 follows the optimizer"));

  for (const int stage : {1, 2}) {
    World world = make_zero_world(kTwoReplicas, stage);
    erase_everywhere(world, is_of_bucket(OpKind::communicate, kParameters, kFinalNorm, -1));
    EXPECT_EQ(all_problems(world),
              "rank 0: parameters of bucket 4 are gathered 0 times after the optimizer, not once\n"
              "rank 1: parameters of bucket 4 are gathered 0 times after the optimizer, not once\n");

    World early = make_zero_world(kTwoReplicas, stage);
    for (StepProgram& program : early.programs) {
      move_before(program, is_of_bucket(OpKind::communicate, kParameters, 0, -1), is_kind(OpKind::optimizer));
    }
    EXPECT_TRUE(reports(early, "rank 1: all_gather parameters bucket 0 runs before the optimizer"));
  }
}

TEST(ZeroParameters, FindsAGatherThatDoesNotWaitForTheOptimizer) {
  World world = make_zero_world(kTwoReplicas, 1);
  StepProgram& program = world.programs[0];
  const int gather = find_operation(program, is_of_bucket(OpKind::communicate, kParameters, 0, -1));
  program[static_cast<std::size_t>(gather)].after = {gather - 2};  // it follows the optimizer
  EXPECT_TRUE(reports(world, "rank 0: all_gather parameters bucket 0 does not wait for the optimizer"));
}

TEST(ZeroParameters, FindsRanksThatGatherInAnotherOrder) {
  World world = make_zero_world(kTwoReplicas, 1);
  move_before(world.programs[1], is_of_bucket(OpKind::communicate, kParameters, 1, -1),
              is_of_bucket(OpKind::communicate, kParameters, 0, -1));
  EXPECT_TRUE(reports(world,
                      "gradient group of rank 0: rank 0 is at all_gather parameters bucket 0 of 500 bytes, rank 1 at all_gather "
                      "parameters bucket 1 of 500"));

  // Experts and dense parameters are gathered in groups of other ranks, which then wait for each other.
  World stuck = make_zero_world(WorldShape{.degrees = {.data = 4, .expert = 2}, .experts = true}, 1);
  move_before(stuck.programs[1], is_of_bucket(OpKind::communicate, kParameters, 1, -1),
              is_of_bucket(OpKind::communicate, kParameters, 0, -1));
  EXPECT_TRUE(reports(stuck, "deadlock: "));
  EXPECT_TRUE(reports(stuck, "rank 1 is stuck at all_gather parameters bucket 1"));
}

TEST(ZeroParameters, FindsARankThatGathersLess) {
  World world = make_zero_world(kTwoReplicas, 3);
  StepProgram& program = world.programs[1];
  for (const OpKind kind : {OpKind::allocate, OpKind::communicate, OpKind::free}) {
    erase_operation(program, find_operation(program, is_of_bucket(kind, kParameters, kFinalNorm, 1)));
  }
  chain(program);
  EXPECT_TRUE(reports(world, "deadlock: "));
}

TEST(ZeroParameters, FindsASecondGather) {
  const auto twice = [](int stage, int micro_batch) {
    World world = make_zero_world(kTwoReplicas, stage);
    for (StepProgram& program : world.programs) {
      const int gather = find_operation(program, is_of_bucket(OpKind::communicate, kParameters, 1, micro_batch));
      program.insert(program.begin() + gather, program[static_cast<std::size_t>(gather)]);
      chain(program);
    }
    return world;
  };
  EXPECT_TRUE(reports(twice(3, 0), "rank 0: all_gather parameters bucket 1 mb 0 after all_gather parameters bucket 1 mb 0"));
  EXPECT_TRUE(reports(twice(1, -1), "rank 0: parameters of bucket 1 are gathered 2 times after the optimizer, not once"));
}

TEST(ZeroParameters, FindsAGatherIntoNothingAndOneThatIsNoGather) {
  World nothing = make_zero_world(kTwoReplicas, 3);
  for (StepProgram& program : nothing.programs) {
    move_before(program, is_of_bucket(OpKind::communicate, kParameters, 1, 0), is_of_bucket(OpKind::allocate, kParameters, 1, 0));
  }
  EXPECT_TRUE(reports(nothing, "rank 0: all_gather parameters bucket 1 mb 0, which are not allocated"));

  World other = make_zero_world(kTwoReplicas, 2);
  for (StepProgram& program : other.programs) {
    the(program, is_of_bucket(OpKind::communicate, kParameters, 1, -1)).collective = Collective::broadcast;
  }
  EXPECT_TRUE(reports(other, "rank 0: broadcast parameters bucket 1: parameters are brought together by all_gather"));
}

}  // namespace
}  // namespace tandem
