// SPDX-License-Identifier: Apache-2.0
// Gradients, memory and communication of check_programs(), and time_programs().
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/step_program.h"
#include "core/step_program_test_support.h"

namespace tandem {
namespace {

using namespace step_program_test;

const WorldShape kOneRank{};
const WorldShape kPipeline{.degrees = {.pipeline = 2}};

TEST(ProgramGradients, FindsABucketThatDoesNotWaitForItsOwnLayerInEveryMicroBatch) {
  for (const int micro_batch : {0, 1}) {
    World world = make_world(kTwoReplicas);
    StepProgram& program = world.programs[1];
    const int weight = find_operation(program, is_compute(Phase::backward_weight, Part::block, 2, micro_batch));
    std::erase(the(program, is_bucket(1)).after, weight);  // buckets 0.. are layers 3, 2, 1, 0

    EXPECT_EQ(all_problems(world),
              "rank 1: all_reduce bucket 1 does not wait for backward_weight h.2 mb " + std::to_string(micro_batch) + "\n");
  }
}

TEST(ProgramGradients, FindsABucketThatWaitsForAnotherLayerAlone) {
  World world = make_world(kTwoReplicas);
  StepProgram& program = world.programs[0];
  the(program, is_bucket(2)).after = the(program, is_bucket(0)).after;

  EXPECT_TRUE(reports(world, "rank 0: all_reduce bucket 2 does not wait for backward_weight h.1 mb 0"));
}

TEST(ProgramGradients, FollowsDependenciesThroughOthers) {
  World world = make_world(kTwoReplicas);
  StepProgram& program = world.programs[0];
  // The last weight part waits for all before it, and the buckets for that alone.
  const int last = find_operation(program, is_compute(Phase::backward_weight, Part::embedding, -1, 1));
  for (int i = 0; i < last; ++i) program[static_cast<std::size_t>(last)].after.push_back(i);
  for (int bucket = 0; bucket < 5; ++bucket) the(program, is_bucket(bucket)).after = {last};

  EXPECT_EQ(all_problems(world), "");
}

TEST(ProgramGradients, FindsATiedSumThatDoesNotWaitForTheEmbedding) {
  World world = make_world(kOneRank);
  StepProgram& program = world.programs[0];
  Operation sum{
      .kind = OpKind::communicate, .axis = GroupAxis::embedding, .purpose = Purpose::gradient, .bucket = kTiedEmbeddingGradient};
  for (const int micro_batch : {0, 1}) {
    for (const int piece : {0, 1}) {
      sum.after.push_back(find_operation(program, is_compute(Phase::forward, Part::head_loss, -1, micro_batch, piece)));
    }
  }
  const int norm = find_operation(program, is_kind(OpKind::gradient_norm));
  program.insert(program.begin() + norm, sum);
  program[static_cast<std::size_t>(norm) + 1].after = {norm};
  program[static_cast<std::size_t>(norm) + 2].after = {norm + 1};

  EXPECT_EQ(all_problems(world),
            "rank 0: all_reduce tied embedding gradient does not wait for backward_weight embedding mb 0\n"
            "rank 0: all_reduce tied embedding gradient does not wait for backward_weight embedding mb 1\n");
}

TEST(ProgramGradients, FindsBucketsReducedNeverTwiceOrForNothing) {
  World never = make_world(kTwoReplicas);
  for (StepProgram& program : never.programs) the(program, is_bucket(0)).purpose = Purpose::other;
  EXPECT_TRUE(reports(never, "rank 0: gradient bucket 0 is reduced 0 times, not 1"));

  World twice = make_world(kTwoReplicas);
  for (StepProgram& program : twice.programs) the(program, is_bucket(0)).bucket = 1;
  EXPECT_TRUE(reports(twice, "rank 1: gradient bucket 1 is reduced 2 times, not 1"));

  World alone = make_world(kTwoReplicas);
  for (RankExpectation& expected : alone.expectation.ranks) expected.bucket_is_reduced[3] = false;
  EXPECT_TRUE(reports(alone, "rank 0: gradient bucket 3 is reduced 1 times, not 0"));

  World unknown = make_world(kTwoReplicas);
  for (StepProgram& program : unknown.programs) the(program, is_bucket(0)).bucket = 9;
  EXPECT_TRUE(reports(unknown, "rank 0: gradient bucket 9 does not exist"));
}

TEST(ProgramGradients, FindsANormThatDoesNotWaitForABucket) {
  World world = make_world(kTwoReplicas);
  StepProgram& program = world.programs[1];
  std::erase(the(program, is_kind(OpKind::gradient_norm)).after, find_operation(program, is_bucket(4)));

  EXPECT_EQ(all_problems(world), "rank 1: the gradient norm does not wait for all_reduce bucket 4\n");
}

TEST(ProgramGradients, FindsAnOptimizerOutOfPlace) {
  World early = make_world(kOneRank);
  StepProgram& program = early.programs[0];
  move_operation(program, find_operation(program, is_kind(OpKind::optimizer)), 0);
  program[0].after.clear();
  EXPECT_TRUE(reports(early, "rank 0: the optimizer runs before the gradient norm"));

  World missing = make_world(kOneRank);
  missing.programs[0].pop_back();
  EXPECT_TRUE(reports(missing, "rank 0: the optimizer runs 0 times, not once"));

  World unclipped = make_world(kOneRank);
  StepProgram& other = unclipped.programs[0];
  move_operation(other, find_operation(other, is_kind(OpKind::gradient_norm)),
                 find_operation(other, is_compute(Phase::backward_weight, Part::embedding, -1, 1)));
  EXPECT_TRUE(reports(unclipped, "rank 0: the gradient norm is taken before backward_weight embedding mb 1"));
}

TEST(ProgramGradients, FindsANormThatIsNotSummedOverTheModelInItsPlace) {
  const auto is_sum = [](const Operation& op) { return op.kind == OpKind::communicate && op.axis == GroupAxis::model; };
  World late = make_world(WorldShape{.degrees = {.tensor = 2}});
  StepProgram& program = late.programs[1];
  move_operation(program, find_operation(program, is_sum), static_cast<int>(program.size()) - 1);
  EXPECT_EQ(all_problems(late), "rank 1: the sum over the model group is not between gradient norm and optimizer\n");

  World early = make_world(kPipeline);
  StepProgram& other = early.programs[0];
  move_operation(other, find_operation(other, is_sum), find_operation(other, is_kind(OpKind::gradient_norm)));
  EXPECT_EQ(all_problems(early), "rank 0: the sum over the model group is not between gradient norm and optimizer\n");

  World never = make_world(kPipeline);
  for (StepProgram& each : never.programs) erase_operation(each, find_operation(each, is_sum));
  EXPECT_TRUE(reports(never, "rank 1: the gradient norm is summed over the model group 0 times, not once"));
}

Wanted is_memory(OpKind kind, int layer, int micro_batch) {
  return [=](const Operation& op) {
    return op.kind == kind && op.part == Part::block && op.layer == layer && op.micro_batch == micro_batch;
  };
}

TEST(ProgramMemory, FindsADoubleFree) {
  World world = make_world(kOneRank);
  StepProgram& program = world.programs[0];
  program.push_back(the(program, is_memory(OpKind::free, 1, 0)));

  EXPECT_TRUE(reports(world, "rank 0: free activations h.1 mb 0 of what is not allocated"));
}

TEST(ProgramMemory, FindsWhatIsAllocatedTwiceOrNeverFreed) {
  World world = make_world(kOneRank);
  StepProgram& program = world.programs[0];
  erase_operation(program, find_operation(program, is_memory(OpKind::free, 3, 1)));
  EXPECT_EQ(all_problems(world), "rank 0: allocate activations h.3 mb 1 is never freed\n");

  program.insert(program.begin(), the(program, is_memory(OpKind::allocate, 0, 0)));
  EXPECT_TRUE(reports(world, "allocate activations h.0 mb 0 while it is already allocated"));
}

TEST(ProgramMemory, FindsAFreeOfOtherBytes) {
  World world = make_world(kOneRank);
  the(world.programs[0], is_memory(OpKind::free, 2, 0)).bytes = 99;

  EXPECT_EQ(all_problems(world), "rank 0: free activations h.2 mb 0 of 99 bytes, but 100 were allocated\n");
}

TEST(ProgramMemory, FindsComputeAfterItsActivationsAreFreed) {
  World world = make_world(kOneRank);
  StepProgram& program = world.programs[0];
  move_operation(program, find_operation(program, is_memory(OpKind::free, 1, 0)),
                 find_operation(program, is_compute(Phase::backward_weight, Part::block, 1, 0)));

  EXPECT_EQ(all_problems(world), "rank 0: backward_weight h.1 mb 0 runs without its activations\n");
}

TEST(ProgramCommunication, FindsADisagreementWithinOneTensorGroupAlone) {
  World world = make_world(WorldShape{.degrees = {.data = 2, .tensor = 2}});
  Operation& op = the(world.programs[3], [](const Operation& o) {
    return o.kind == OpKind::communicate && o.axis == GroupAxis::tensor && o.layer == 2 && o.micro_batch == 1;
  });
  op.bytes = 60;

  EXPECT_EQ(all_problems(world),
            "tensor group of rank 2: rank 2 is at all_reduce forward h.2 mlp mb 1 of 64 bytes, rank 3 at "
            "all_reduce forward h.2 mlp mb 1 of 60\n");
}

TEST(ProgramCommunication, FindsASumThatIsMovedAwayFromItsPart) {
  const auto is_sum = [](const Operation& op) {
    return op.kind == OpKind::communicate && op.axis == GroupAxis::tensor && op.phase == Phase::forward && op.layer == 1;
  };
  World early = make_world(WorldShape{.degrees = {.tensor = 2}});
  StepProgram& program = early.programs[1];
  move_operation(program, find_operation(program, is_sum), find_operation(program, is_compute(Phase::forward, Part::mlp, 1, 0)));
  EXPECT_EQ(all_problems(early), "rank 1: all_reduce forward h.1 mlp mb 0 runs before forward h.1 mlp mb 0\n");

  World late = make_world(WorldShape{.degrees = {.tensor = 2}});
  StepProgram& other = late.programs[0];
  move_operation(other, find_operation(other, is_sum), find_operation(other, is_compute(Phase::forward, Part::mlp_merge, 1, 0)));
  EXPECT_EQ(all_problems(late), "rank 0: forward h.1 mlp_merge mb 0 runs before all_reduce forward h.1 mlp mb 0\n");

  World stray = make_world(WorldShape{.degrees = {.tensor = 2}});
  for (StepProgram& each : stray.programs) the(each, is_sum).layer = 9;
  EXPECT_TRUE(reports(stray, "rank 0: all_reduce forward h.9 mlp mb 0 sends the result of no part of this rank"));
}

TEST(ProgramCommunication, FindsBucketsInAnotherOrder) {
  World world = make_world(kTwoReplicas);
  StepProgram& program = world.programs[1];
  move_operation(program, find_operation(program, is_bucket(0)), find_operation(program, is_bucket(1)));

  EXPECT_TRUE(
      reports(world, "gradient group of rank 0: rank 0 is at all_reduce bucket 0 of 1000 bytes, rank 1 at all_reduce bucket 1"));
}

TEST(ProgramCommunication, LetsRanksOfARingSendDifferentBytes) {
  World world = make_world(WorldShape{.degrees = {.context = 2}});
  for (int rank = 0; rank < 2; ++rank) {
    Operation shift{.kind = OpKind::communicate, .collective = Collective::ring_shift, .axis = GroupAxis::context};
    shift.bytes = 100 + rank;
    world.programs[static_cast<std::size_t>(rank)].push_back(shift);
  }
  EXPECT_EQ(all_problems(world), "");

  for (StepProgram& program : world.programs) program.back().collective = Collective::all_gather;
  EXPECT_TRUE(reports(world, "context group of rank 0"));
}

TEST(ProgramCommunication, FindsMessagesThatCross) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[1];
  const int first = find_operation(program, is_message(Collective::recv, Phase::forward, 0));
  const int second = find_operation(program, is_message(Collective::recv, Phase::forward, 1));
  move_operation(program, second, first);  // received before the other, but sent after it

  EXPECT_EQ(all_problems(world),
            "rank 1: recv forward into stage 1 mb 1 from rank 0 of 64 bytes meets send forward into stage 1 mb 0 "
            "to rank 1 of 64 bytes of rank 0\n");
}

TEST(ProgramCommunication, FindsMessagesOfOtherBytes) {
  World world = make_world(kPipeline);
  the(world.programs[0], is_message(Collective::send, Phase::forward, 0)).bytes = 63;

  EXPECT_TRUE(reports(world, "of 64 bytes meets send forward into stage 1 mb 0 to rank 1 of 63 bytes"));
}

TEST(ProgramCommunication, FindsAMessageThatNobodyReceives) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[1];
  erase_operation(program, find_operation(program, is_message(Collective::recv, Phase::forward, 1)));

  EXPECT_TRUE(reports(world, "rank 0: send forward into stage 1 mb 1 to rank 1 is never received"));
}

TEST(ProgramCommunication, NamesTheStuckOperationOfEachRankInADeadlock) {
  World world = make_world(kPipeline);
  // Rank 0 waits for the gradient before it sends its last forward; rank 1 for that forward before it sends any gradient.
  StepProgram& program = world.programs[0];
  const int receive = find_operation(program, is_message(Collective::recv, Phase::backward_input, 0));
  const int send = find_operation(program, is_message(Collective::send, Phase::forward, 1));
  move_operation(program, receive, send);

  EXPECT_TRUE(reports(world, "deadlock: rank 0 is stuck at recv backward_input into stage 0 mb 0 from rank 1 (operation "));
  EXPECT_TRUE(reports(world, "; rank 1 is stuck at recv forward into stage 1 mb 1 from rank 0 (operation "));
}

TEST(ProgramCommunication, FindsRanksThatWaitInACircleOfGroups) {
  World world = make_world(WorldShape{.degrees = {.data = 2, .tensor = 2}});
  // 0 waits for 2 in a gradient sum, 2 for 3 in a tensor sum, 3 for 1 in a gradient sum, 1 for 0 in a tensor sum.
  for (const std::size_t rank : {0U, 3U}) {
    StepProgram& program = world.programs[rank];
    the(program, is_bucket(0)).after.clear();
    move_operation(program, find_operation(program, is_bucket(0)), 0);
  }

  EXPECT_TRUE(reports(world,
                      "deadlock: rank 0 is stuck at all_reduce bucket 0 (operation 0); rank 1 is stuck at all_reduce "
                      "forward h.0 mlp mb 0 (operation "));
  EXPECT_TRUE(reports(world, "rank 3 is stuck at all_reduce bucket 0 (operation 0)"));
}

TEST(ProgramCommunication, FindsARankThatLeavesTheOthersWaiting) {
  World world = make_world(WorldShape{.degrees = {.data = 3}});
  StepProgram& program = world.programs[2];
  erase_operation(program, find_operation(program, is_bucket(4)));

  EXPECT_TRUE(reports(world, "deadlock: rank 0 is stuck at all_reduce bucket 4"));
  EXPECT_TRUE(reports(world, "; rank 2 has ended"));
}

TEST(ProgramCheck, RefusesExpectationsOfOtherRanks) {
  World world = make_world(kTwoReplicas);
  world.programs.pop_back();
  EXPECT_THROW((void)check_programs(world.programs, world.expectation), ContractError);
}

}  // namespace
}  // namespace tandem
