// SPDX-License-Identifier: Apache-2.0
// Communication in the background in check_programs().
#include <gtest/gtest.h>

#include "core/step_program.h"
#include "core/step_program_test_support.h"

namespace tandem {
namespace {

using namespace step_program_test;

class LegalBackground : public testing::TestWithParam<StagedShape> {};

TEST_P(LegalBackground, IsProven) {
  const World world = make_overlapped_world(GetParam().shape, GetParam().stage);
  std::ptrdiff_t in_background = 0;
  for (const Operation& op : world.programs[0]) in_background += op.background ? 1 : 0;
  EXPECT_GT(in_background, 0);
  EXPECT_EQ(all_problems(world), "");
}

std::vector<StagedShape> legal_shapes() {
  std::vector<StagedShape> all;
  for (const int stage : {0, 1, 2, 3}) {
    for (const WorldShape& shape : {kTwoReplicas, WorldShape{.degrees = {.data = 3, .tensor = 2}},
                                    WorldShape{.degrees = {.data = 2, .pipeline = 2}, .micro_batches = 3},
                                    WorldShape{.degrees = {.data = 4, .expert = 2}, .experts = true},
                                    WorldShape{.degrees = {.data = 2, .pipeline = 2}, .chunks = 2, .v_shaped = true},
                                    WorldShape{.degrees = {.data = 2}, .head_pieces = 0}}) {
      all.push_back({shape, stage});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(StepProgram, LegalBackground, testing::ValuesIn(legal_shapes()));

// The reduction of a bucket; in stages 2 and 3 that of a micro-batch.
Wanted is_sum(int bucket, int micro_batch = -1) { return is_of_bucket(OpKind::communicate, kGradients, bucket, micro_batch); }
Wanted is_gather(int bucket, int micro_batch) { return is_of_bucket(OpKind::communicate, kParameters, bucket, micro_batch); }

// Takes an operation elsewhere, and chains anew.
void move_and_chain(World& world, const Wanted& moved, const Wanted& wanted, bool behind) {
  for (std::size_t rank = 0; rank < world.programs.size(); ++rank) {
    behind ? move_behind(world.programs[rank], moved, wanted) : move_before(world.programs[rank], moved, wanted);
    chain_overlapped(world.programs[rank], world.expectation.ranks[rank]);
  }
}

void forget(StepProgram& program, const Wanted& who, const Wanted& whom) {
  EXPECT_EQ(std::erase(the(program, who).after, find_operation(program, whom)), 1U);
}

TEST(BackgroundProgram, MayBeReducedBehindItsOwnLastContributionAlone) {
  World world = make_overlapped_world(kTwoReplicas, 0);
  const StepProgram& program = world.programs[1];
  // Long before the others: bucket 0 is layer 3, the head's comes before its backward pass.
  EXPECT_LT(find_operation(program, is_sum(0)),
            find_operation(program, is_compute(Phase::backward_input, Part::mlp_merge, 2, 1)));
  World tied_apart = make_overlapped_world(WorldShape{.degrees = {.data = 2, .pipeline = 2}}, 1);
  const StepProgram& last = tied_apart.programs[3];
  ASSERT_GE(tied_apart.expectation.ranks[3].head_chunk, 0);
  const int head = static_cast<int>(tied_apart.expectation.ranks[3].bucket_sources.size()) - 1;
  EXPECT_LT(find_operation(last, is_sum(head)), find_operation(last, is_compute(Phase::backward_input, Part::head_norm, -1, 0)));
}

TEST(BackgroundProgram, FindsABucketIssuedBeforeItsLastContribution) {
  for (const int stage : {0, 1}) {
    World world = make_overlapped_world(kTwoReplicas, stage);
    move_and_chain(world, is_sum(1), is_compute(Phase::backward_weight, Part::block, 2, 1), false);
    const std::string sum = stage == 0 ? "all_reduce bucket 1" : "reduce_scatter gradients bucket 1";
    const std::string problem = sum + " does not wait for backward_weight h.2 mb 1\n";
    EXPECT_EQ(all_problems(world), "rank 0: " + problem + "rank 1: " + problem);
  }
  World head = make_overlapped_world(kTwoReplicas, 1);
  move_and_chain(head, is_sum(kFinalNorm), is_compute(Phase::backward_weight, Part::head_norm, -1, 1), false);
  EXPECT_TRUE(reports(head, "rank 0: reduce_scatter gradients bucket 4 does not wait for backward_weight head_norm mb 1"));
}

TEST(BackgroundProgram, FindsAContributionToABucketUnderWay) {
  for (const int stage : {2, 3}) {
    World world = make_overlapped_world(kTwoReplicas, stage);
    move_and_chain(world, is_compute(Phase::backward_weight, Part::block, 2, 0), is_sum(1, 0), true);
    EXPECT_TRUE(reports(world, "rank 1: backward_weight h.2 mb 0 adds to bucket 1 after reduce_scatter gradients bucket 1 mb 0"));
  }
  // Of the whole step: one micro-batch more than the sum waited for.
  World world = make_overlapped_world(kTwoReplicas, 0);
  move_and_chain(world, is_sum(2), is_compute(Phase::backward_weight, Part::block, 1, 0), true);
  EXPECT_TRUE(reports(world, "rank 0: all_reduce bucket 2 does not wait for backward_weight h.1 mb 1"));
}

TEST(BackgroundProgram, FindsANormThatDoesNotWait) {
  for (const int stage : {0, 1}) {
    World world = make_overlapped_world(kTwoReplicas, stage);
    forget(world.programs[1], is_kind(OpKind::gradient_norm), is_sum(2));
    const std::string sum = stage == 0 ? "all_reduce bucket 2" : "reduce_scatter gradients bucket 2";
    EXPECT_EQ(all_problems(world), "rank 1: nobody waits for " + sum +
                                       ", which is in the background\nrank 1: the gradient norm does not wait for " + sum + "\n");
  }
  // That the norm follows in the program orders nothing, nor that an operation of the same group does.
  World late = make_overlapped_world(kTwoReplicas, 0);
  StepProgram& program = late.programs[0];
  forget(program, is_kind(OpKind::gradient_norm), is_sum(0));
  the(program, is_kind(OpKind::optimizer)).after.push_back(find_operation(program, is_sum(0)));
  EXPECT_EQ(all_problems(late), "rank 0: the gradient norm does not wait for all_reduce bucket 0\n");
}

TEST(BackgroundProgram, FindsAnOptimizerThatDoesNotWait) {
  World world = make_overlapped_world(kTwoReplicas, 0);
  the(world.programs[0], is_kind(OpKind::optimizer)).after.clear();
  EXPECT_TRUE(reports(world, "rank 0: the optimizer does not wait for all_reduce bucket 3"));

  World squares = make_overlapped_world(WorldShape{.degrees = {.data = 2, .tensor = 2}}, 0);
  for (std::size_t rank = 0; rank < squares.programs.size(); ++rank) {
    the(squares.programs[rank], [](const Operation& op) { return op.axis == GroupAxis::model; }).background = true;
    chain_overlapped(squares.programs[rank], squares.expectation.ranks[rank]);
  }
  EXPECT_TRUE(reports(squares, "rank 2: the optimizer does not wait for all_reduce other"));
}

TEST(BackgroundProgram, FindsAFreeThatDoesNotWait) {
  for (const int stage : {2, 3}) {
    World world = make_overlapped_world(kTwoReplicas, stage);
    StepProgram& program = world.programs[1];
    forget(program, is_of_bucket(OpKind::free, kGradients, 1, 0), is_sum(1, 0));
    the(program, is_kind(OpKind::gradient_norm)).after.push_back(find_operation(program, is_sum(1, 0)));
    EXPECT_EQ(all_problems(world),
              "rank 1: free gradients bucket 1 mb 0 does not wait for reduce_scatter gradients bucket 1 mb 0\n");
  }
}

TEST(BackgroundProgram, FindsSumsOverOtherAxesThatDoNotWaitForTheReductionsOfTheirBuckets) {
  for (const int stage : {0, 1}) {
    for (const int which : {kTensorPartialGradients, kTiedEmbeddingGradient}) {
      World world = make_overlapped_world(WorldShape{.degrees = {.data = 2, .tensor = 2}}, stage);
      const int buckets = static_cast<int>(world.expectation.ranks[0].bucket_sources.size());
      for (std::size_t rank = 0; rank < world.programs.size(); ++rank) {
        StepProgram& program = world.programs[rank];
        Operation sum{.kind = OpKind::communicate, .axis = GroupAxis::tensor, .purpose = Purpose::gradient, .bucket = which};
        program.insert(program.begin() + find_operation(program, is_kind(OpKind::gradient_norm)), sum);
        chain_overlapped(program, world.expectation.ranks[rank]);
      }
      const std::string sum = which == kTiedEmbeddingGradient ? "tied embedding gradient" : "tensor-partial gradients";
      const std::string last = (stage == 0 ? "all_reduce bucket " : "reduce_scatter gradients bucket ");
      EXPECT_TRUE(reports(world, "rank 3: all_reduce " + sum + " does not wait for " + last + std::to_string(buckets - 1)));
      const bool asks_for_layers = static_cast<bool>(reports(world, "all_reduce " + sum + " does not wait for " + last + "0"));
      EXPECT_EQ(asks_for_layers, which == kTensorPartialGradients);

      for (StepProgram& program : world.programs) {
        Operation& waiting = the(program, is_bucket(which));
        for (int bucket = 0; bucket < buckets; ++bucket) {
          if (which == kTensorPartialGradients || bucket >= 4) waiting.after.push_back(find_operation(program, is_sum(bucket)));
        }
      }
      EXPECT_EQ(all_problems(world), "");
    }
  }
}

TEST(BackgroundProgram, FindsBucketsThatAreReducedAfterASumOverAnotherAxis) {
  World world = make_world(WorldShape{.degrees = {.data = 2, .tensor = 2}});  // nothing in the background
  for (StepProgram& program : world.programs) {
    Operation sum{
        .kind = OpKind::communicate, .axis = GroupAxis::tensor, .purpose = Purpose::gradient, .bucket = kTensorPartialGradients};
    program.insert(program.begin() + find_operation(program, is_sum(0)), sum);
    chain(program);
  }
  EXPECT_TRUE(reports(world, "rank 0: all_reduce tensor-partial gradients does not wait for all_reduce bucket 0"));
}

TEST(BackgroundProgram, FindsParametersReadWhileTheyAreGathered) {
  World world = make_overlapped_world(kTwoReplicas, 3);
  StepProgram& program = world.programs[0];
  forget(program, is_compute(Phase::forward, Part::norm_1, 1, 0), is_gather(2, 0));
  the(program, is_compute(Phase::forward, Part::attention_in, 1, 0)).after.push_back(find_operation(program, is_gather(2, 0)));

  EXPECT_EQ(all_problems(world), "rank 0: forward h.1 norm_1 mb 0 does not wait for all_gather parameters bucket 2 mb 0\n");
}

TEST(BackgroundProgram, FindsParametersFreedWhileTheyAreGathered) {
  World world = make_overlapped_world(kTwoReplicas, 3);
  for (std::size_t rank = 0; rank < world.programs.size(); ++rank) {
    StepProgram& program = world.programs[rank];
    Operation memory{.kind = OpKind::allocate, .bucket = 2, .category = kParameters};
    Operation gather = the(program, is_gather(2, 0));
    program.insert(program.begin(), {memory, gather, memory});
    program[2].kind = OpKind::free;
    chain_overlapped(program, world.expectation.ranks[rank]);
  }
  EXPECT_TRUE(reports(world, "rank 1: free parameters bucket 2 does not wait for all_gather parameters bucket 2 mb 0"));
}

TEST(BackgroundProgram, FindsWhatNobodyWaitsForAndWhatCannotBeInTheBackground) {
  World world = make_overlapped_world(kTwoReplicas, 1);
  for (StepProgram& program : world.programs) the(program, is_gather(3, -1)).background = true;
  for (std::size_t rank = 0; rank < world.programs.size(); ++rank) {
    chain_overlapped(world.programs[rank], world.expectation.ranks[rank]);
  }
  EXPECT_EQ(all_problems(world),
            "rank 0: nobody waits for all_gather parameters bucket 3, which is in the background\n"
            "rank 1: nobody waits for all_gather parameters bucket 3, which is in the background\n");

  World pipeline = make_world(WorldShape{.degrees = {.pipeline = 2}});
  the(pipeline.programs[1], is_message(Collective::recv, Phase::forward, 0)).background = true;
  the(pipeline.programs[0], is_compute(Phase::forward, Part::mlp, 0, 0)).background = true;
  EXPECT_TRUE(reports(pipeline, "rank 1: recv forward into stage 1 mb 0 from rank 0 is in the background, where only"));
  EXPECT_TRUE(reports(pipeline, "rank 0: forward h.0 mlp mb 0 is in the background, where only collectives can be"));
}

TEST(BackgroundProgram, FindsActivationsTakenUpWhileTheyAreSummed) {
  const auto is_activation_sum = [](const Operation& op) {
    return op.kind == OpKind::communicate && op.axis == GroupAxis::tensor && op.phase == Phase::forward && op.layer == 1;
  };
  const auto with = [&](bool merge_waits, bool sum_waits) {
    World world = make_world(WorldShape{.degrees = {.tensor = 2}});
    for (StepProgram& program : world.programs) {
      chain(program);
      const int sum = find_operation(program, is_activation_sum);
      program[static_cast<std::size_t>(sum)].background = true;
      Operation& merge = program[static_cast<std::size_t>(sum) + 1];
      merge.after = {sum - 1};
      if (!sum_waits) program[static_cast<std::size_t>(sum)].after = {sum - 2};
      (merge_waits ? merge : program.back()).after.push_back(sum);
    }
    return world;
  };
  EXPECT_EQ(all_problems(with(true, true)), "");
  EXPECT_TRUE(reports(with(false, true), "rank 1: forward h.1 mlp_merge mb 0 does not wait for all_reduce forward h.1 mlp mb 0"));
  EXPECT_TRUE(reports(with(true, false), "rank 0: all_reduce forward h.1 mlp mb 0 does not wait for forward h.1 mlp mb 0"));
}

TEST(BackgroundProgram, FindsBucketsInAnotherOrder) {
  World world = make_overlapped_world(kTwoReplicas, 0);
  move_before(world.programs[1], is_sum(2), is_sum(1));
  chain_overlapped(world.programs[1], world.expectation.ranks[1]);
  EXPECT_TRUE(
      reports(world, "gradient group of rank 0: rank 0 is at all_reduce bucket 1 of 1000 bytes, rank 1 at all_reduce bucket 2"));
}

TEST(BackgroundProgram, LetsOneRankWaitWhereAnotherGoesOn) {
  World world = make_overlapped_world(kTwoReplicas, 0);
  for (Operation& op : world.programs[1]) op.background = false;
  chain(world.programs[1]);
  EXPECT_EQ(all_problems(world), "");
}

TEST(BackgroundProgram, NamesWhatAStuckRankWaitsFor) {
  World world = make_overlapped_world(kTwoReplicas, 0);
  StepProgram& program = world.programs[1];
  erase_operation(program, find_operation(program, is_sum(4)));
  EXPECT_TRUE(reports(world, "deadlock: rank 0 is stuck at gradient_norm (operation "));
  EXPECT_TRUE(reports(world, "), which waits for all_reduce bucket 4; rank 1 has ended"));

  forget(world.programs[0], is_kind(OpKind::gradient_norm), is_sum(4));
  EXPECT_TRUE(reports(world, "deadlock: all_reduce bucket 4 of rank 0 is never complete; rank 0 has ended; rank 1 has ended"));
}

TEST(BackgroundProgram, LetsRanksIssueTheOperationsOfDifferentGroupsInAnyOrder) {
  World world = make_world(kTwoReplicas);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    Operation first{.kind = OpKind::communicate, .part = Part::message, .axis = GroupAxis::world, .bytes = 8};
    Operation second{.kind = OpKind::communicate, .part = Part::message, .axis = GroupAxis::data, .bytes = 16};
    if (rank == 1) std::swap(first, second);
    world.programs[rank].insert(world.programs[rank].end(), {first, second});
  }
  EXPECT_TRUE(reports(world, "deadlock: "));  // each waits for the other's second one
  for (StepProgram& program : world.programs) {
    const auto size = static_cast<OperationId>(program.size());
    program[program.size() - 2].background = true;
    program.push_back({.kind = OpKind::communicate, .part = Part::message, .axis = GroupAxis::world, .bytes = 24});
    program.back().after = {size - 2};
  }
  EXPECT_EQ(all_problems(world), "");
}

}  // namespace
}  // namespace tandem
