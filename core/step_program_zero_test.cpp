// SPDX-License-Identifier: Apache-2.0
// ZeRO in check_programs().
#include <gtest/gtest.h>

#include "core/step_program.h"
#include "core/step_program_test_support.h"

namespace tandem {
namespace {

using namespace step_program_test;

class LegalZeroPrograms : public testing::TestWithParam<StagedShape> {};

TEST_P(LegalZeroPrograms, AreProven) { EXPECT_EQ(all_problems(make_zero_world(GetParam().shape, GetParam().stage)), ""); }

std::vector<StagedShape> legal_shapes() {
  std::vector<StagedShape> all;
  for (const int stage : {1, 2, 3}) {
    for (const WorldShape& shape :
         {WorldShape{}, kTwoReplicas, WorldShape{.degrees = {.data = 3, .tensor = 2}},
          WorldShape{.degrees = {.data = 2, .pipeline = 2}, .micro_batches = 3}, WorldShape{.degrees = {.context = 2}},
          WorldShape{.degrees = {.data = 2, .expert = 2}, .experts = true},
          WorldShape{.degrees = {.data = 4, .expert = 2}, .experts = true},
          WorldShape{.degrees = {.data = 2, .pipeline = 2}, .chunks = 2, .v_shaped = true},
          WorldShape{.degrees = {.data = 2}, .head_pieces = 0}}) {
      all.push_back({shape, stage});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(StepProgram, LegalZeroPrograms, testing::ValuesIn(legal_shapes()));

TEST(ZeroProgram, SaysWhatAnOperationIs) {
  World world = make_zero_world(kTwoReplicas, 3);
  StepProgram& program = world.programs[0];

  EXPECT_EQ(to_string(the(program, is_of_bucket(OpKind::communicate, kParameters, 3, 0))), "all_gather parameters bucket 3 mb 0");
  EXPECT_EQ(to_string(the(program, is_of_bucket(OpKind::communicate, kGradients, 3, 1))),
            "reduce_scatter gradients bucket 3 mb 1");
  EXPECT_EQ(to_string(the(program, is_of_bucket(OpKind::allocate, kGradients, 3, 1))), "allocate gradients bucket 3 mb 1");
  EXPECT_EQ(to_string(the(program, is_of_bucket(OpKind::free, kParameters, 0, 1))), "free parameters bucket 0 mb 1");
  World whole = make_zero_world(kTwoReplicas, 1);
  EXPECT_EQ(to_string(the(whole.programs[0], is_of_bucket(OpKind::communicate, kParameters, 2, -1))),
            "all_gather parameters bucket 2");
}

TEST(ZeroProgram, CountsPeaksByCategoryAndBytesOnTheWire) {
  const auto facts = [](int stage) {
    const World world = make_zero_world(kTwoReplicas, stage);
    return check_programs(world.programs, world.expectation);
  };
  const auto peak = [](const ProgramFacts& of, MemoryCategory category) {
    return of.peak_bytes_by_category[static_cast<std::size_t>(category)];
  };
  const auto wire = [](const ProgramFacts& of, Purpose purpose) { return of.wire_bytes[static_cast<std::size_t>(purpose)]; };
  const ProgramFacts one = facts(1), two = facts(2), three = facts(3);

  EXPECT_EQ(peak(one, kGradients), 0);
  EXPECT_EQ(peak(two, kGradients), 2 * kGradientBytes);  // both embedding tables at once
  EXPECT_EQ(peak(two, kParameters), 0);
  EXPECT_EQ(peak(three, kParameters), kParameterBytes);
  EXPECT_EQ(peak(three, MemoryCategory::activations), one.peak_bytes);
  // Seven buckets, two ranks that each send half. With two micro-batches, the table reduced for the head and for the embedding;
  // blocks and final norm gathered forward and backward, the table for the embedding and for the head.
  EXPECT_EQ(wire(one, Purpose::gradient), 7 * kGradientBytes);
  EXPECT_EQ(wire(one, Purpose::parameter), 7 * kParameterBytes);
  EXPECT_EQ(wire(two, Purpose::gradient), 2 * 8 * kGradientBytes);
  EXPECT_EQ(wire(three, Purpose::parameter), 2 * (2 * 5 + 1 + 2) * kParameterBytes);
}

TEST(ZeroProgram, FindsAMissingReduction) {
  World one = make_zero_world(kTwoReplicas, 1);
  erase_everywhere(one, is_of_bucket(OpKind::communicate, kGradients, 2, -1));
  EXPECT_EQ(all_problems(one),
            "rank 0: gradient bucket 2 is reduced 0 times, not 1\nrank 1: gradient bucket 2 is reduced 0 times, not 1\n");

  for (const int stage : {2, 3}) {
    World world = make_zero_world(kTwoReplicas, stage);
    erase_everywhere(world, is_of_bucket(OpKind::communicate, kGradients, 2, 1));
    EXPECT_EQ(all_problems(world),
              "rank 0: free gradients bucket 2 mb 1 before they are reduced\n"
              "rank 1: free gradients bucket 2 mb 1 before they are reduced\n");
  }
}

TEST(ZeroProgram, FindsAReductionBeforeTheLastAddition) {
  for (const int stage : {2, 3}) {
    World world = make_zero_world(kTwoReplicas, stage);
    for (StepProgram& program : world.programs) {
      move_before(program, is_of_bucket(OpKind::communicate, kGradients, 1, 0),
                  is_compute(Phase::backward_weight, Part::block, 2, 0));
    }
    EXPECT_TRUE(reports(world, "rank 1: backward_weight h.2 mb 0 adds to bucket 1 after reduce_scatter gradients bucket 1 mb 0"));
  }
  World head = make_zero_world(kTwoReplicas, 2);
  for (StepProgram& program : head.programs) {
    move_before(program, is_of_bucket(OpKind::communicate, kGradients, kTable, 0),
                is_compute(Phase::forward, Part::head_loss, -1, 0, 1));
  }
  EXPECT_TRUE(
      reports(head, "rank 0: forward head_loss mb 0 piece 1 adds to bucket 6 after reduce_scatter gradients bucket 6 mb 0"));
}

TEST(ZeroProgram, FindsAReductionThatDoesNotWait) {
  World world = make_zero_world(kTwoReplicas, 2);
  const int reduction = find_operation(world.programs[0], is_of_bucket(OpKind::communicate, kGradients, 1, 0));
  world.programs[0][static_cast<std::size_t>(reduction)].after = {reduction - 2};
  EXPECT_EQ(all_problems(world), "rank 0: reduce_scatter gradients bucket 1 mb 0 does not wait for backward_weight h.2 mb 0\n");

  World freed = make_zero_world(kTwoReplicas, 2);
  const int free = find_operation(freed.programs[1], is_of_bucket(OpKind::free, kGradients, 1, 0));
  freed.programs[1][static_cast<std::size_t>(free)].after = {free - 2};
  EXPECT_TRUE(reports(freed, "rank 1: free gradients bucket 1 mb 0 does not wait for reduce_scatter gradients bucket 1 mb 0"));
  EXPECT_TRUE(reports(freed, "rank 1: the gradient norm does not wait for reduce_scatter gradients bucket 1 mb 0"));
}

TEST(ZeroProgram, FindsAnAdditionAfterTheReductionOfTheStep) {
  World world = make_zero_world(kTwoReplicas, 1);
  StepProgram& program = world.programs[0];
  move_before(program, is_of_bucket(OpKind::communicate, kGradients, 3, -1),
              is_compute(Phase::backward_weight, Part::block, 0, 1));
  EXPECT_TRUE(reports(world, "rank 0: reduce_scatter gradients bucket 3 does not wait for backward_weight h.0 mb 1"));

  World head = make_zero_world(kTwoReplicas, 1);
  move_before(head.programs[1], is_of_bucket(OpKind::communicate, kGradients, kFinalNorm, -1),
              is_compute(Phase::backward_weight, Part::head_norm, -1, 1));
  EXPECT_TRUE(reports(head, "rank 1: reduce_scatter gradients bucket 4 does not wait for backward_weight head_norm mb 1"));
}

TEST(ZeroProgram, FindsAdditionsToGradientsThatDoNotExist) {
  World world = make_zero_world(kTwoReplicas, 2);
  for (const OpKind kind : {OpKind::allocate, OpKind::communicate, OpKind::free}) {
    erase_everywhere(world, is_of_bucket(kind, kGradients, kPositions, 1));
  }
  EXPECT_EQ(all_problems(world),
            "rank 0: backward_weight embedding mb 1 adds to gradients of bucket 5, which are not allocated\n"
            "rank 1: backward_weight embedding mb 1 adds to gradients of bucket 5, which are not allocated\n");
}

TEST(ZeroProgram, LetsTheTokenTableWaitForTheTokensOfAllRanks) {
  // Under sequence parallelism the table's own part of the backward pass follows that of the positions.
  Operation lookup;
  lookup.phase = Phase::backward_weight;
  lookup.part = Part::embedding_lookup;
  lookup.micro_batch = 1;
  const auto with_lookup = [&](const Wanted& before) {
    World world = make_zero_world(kTwoReplicas, 2);
    for (StepProgram& program : world.programs) {
      // The gradients of the head are the first of the table, those of the embedding the last.
      int at = -1;
      for (int i = 0; i < std::ssize(program); ++i) at = before(program[static_cast<std::size_t>(i)]) ? i : at;
      program.insert(program.begin() + at, lookup);
      chain(program);
      const auto released = [](const Operation& op) { return op.category == MemoryCategory::activations && op.micro_batch == 1; };
      const int free = find_operation(
          program, [&](const Operation& op) { return op.kind == OpKind::free && released(op) && op.part == Part::embedding; });
      move_operation(program, free, static_cast<int>(program.size()) - 1);
      chain(program);
    }
    return all_problems(world);
  };
  EXPECT_EQ(with_lookup(is_of_bucket(OpKind::communicate, kGradients, kTable, 1)), "");
  EXPECT_NE(with_lookup(is_of_bucket(OpKind::free, kGradients, kTable, 1)).find("embedding_lookup mb 1 adds to bucket 6 after"),
            std::string::npos);
}

TEST(ZeroProgram, FindsASumInAnotherWay) {
  for (const int stage : {1, 2, 3}) {
    World world = make_zero_world(kTwoReplicas, stage);
    for (StepProgram& program : world.programs) {
      the(program, is_of_bucket(OpKind::communicate, kGradients, 0, stage == 1 ? -1 : 0)).collective = Collective::all_reduce;
    }
    EXPECT_TRUE(reports(world, "rank 0: all_reduce bucket 0: with ZeRO gradients are reduced by reduce_scatter"));
  }
}

TEST(ZeroProgram, FindsASecondReduction) {
  World world = make_zero_world(kTwoReplicas, 3);
  for (StepProgram& program : world.programs) {
    const int reduction = find_operation(program, is_of_bucket(OpKind::communicate, kGradients, 0, 1));
    program.insert(program.begin() + reduction, program[static_cast<std::size_t>(reduction)]);
    chain(program);
  }
  EXPECT_TRUE(reports(world, "rank 0: reduce_scatter gradients bucket 0 mb 1 after reduce_scatter gradients bucket 0 mb 1"));
}

TEST(ZeroProgram, FindsCommunicationOfABucketWithOneRank) {
  for (const int stage : {1, 2, 3}) {
    World world = make_zero_world(kTwoReplicas, stage);
    for (RankExpectation& expected : world.expectation.ranks) expected.bucket_is_reduced[1] = false;
    EXPECT_TRUE(reports(world, "rank 0: all_gather parameters bucket 1"));
    EXPECT_TRUE(reports(world, "rank 1: reduce_scatter gradients bucket 1"));
    EXPECT_TRUE(reports(world, ": the bucket has one rank"));
  }
}

TEST(ZeroProgram, FindsWhatAStageKeepsWhole) {
  World gradients = make_zero_world(kTwoReplicas, 2);
  for (RankExpectation& expected : gradients.expectation.ranks) expected.zero_stage = 1;
  EXPECT_TRUE(reports(gradients, "rank 0: allocate gradients bucket 0 mb 0: stage 1 keeps whole gradients"));

  World parameters = make_zero_world(kTwoReplicas, 3);
  for (RankExpectation& expected : parameters.expectation.ranks) expected.zero_stage = 2;
  EXPECT_TRUE(reports(parameters, "rank 0: allocate parameters bucket 3 mb 0: stage 2 keeps whole parameters"));
  EXPECT_TRUE(reports(parameters, "rank 0: all_gather parameters bucket 3 mb 0 runs before the optimizer"));
}

TEST(ZeroProgram, FindsBucketsThatExistTwice) {
  World world = make_zero_world(kTwoReplicas, 3);
  for (StepProgram& program : world.programs) {
    move_before(program, is_of_bucket(OpKind::allocate, kParameters, 0, 1), is_of_bucket(OpKind::free, kParameters, 0, 0));
  }
  EXPECT_TRUE(reports(world, "rank 0: allocate parameters bucket 0 mb 1 after allocate parameters bucket 0 mb 0"));

  World gradients = make_zero_world(kTwoReplicas, 2);
  for (StepProgram& program : gradients.programs) {
    move_before(program, is_of_bucket(OpKind::allocate, kGradients, 0, 1), is_of_bucket(OpKind::free, kGradients, 0, 0));
  }
  EXPECT_TRUE(reports(gradients, "rank 0: allocate gradients bucket 0 mb 1 after allocate gradients bucket 0 mb 0"));
}

TEST(ZeroProgram, FindsANormOfOwnPartsAlone) {
  const auto is_sum = [](GroupAxis axis) {
    return [=](const Operation& op) { return op.kind == OpKind::communicate && op.axis == axis && op.purpose == Purpose::other; };
  };
  for (const int stage : {1, 2, 3}) {
    World world = make_zero_world(kTwoReplicas, stage);
    erase_everywhere(world, is_sum(GroupAxis::gradient));
    EXPECT_EQ(all_problems(world),
              "rank 0: the gradient norm is summed over the gradient group 0 times, not once\n"
              "rank 1: the gradient norm is summed over the gradient group 0 times, not once\n");
  }
  World experts = make_zero_world(WorldShape{.degrees = {.data = 4, .expert = 2}, .experts = true}, 2);
  erase_everywhere(experts, is_sum(GroupAxis::expert_gradient));
  EXPECT_TRUE(reports(experts, "rank 0: the gradient norm is summed over the expert_gradient group 0 times, not once"));

  World early = make_zero_world(WorldShape{.degrees = {.data = 2, .tensor = 2}}, 1);
  for (StepProgram& program : early.programs) move_before(program, is_sum(GroupAxis::gradient), is_kind(OpKind::gradient_norm));
  EXPECT_TRUE(reports(early, "rank 3: the gradient norm is summed over the gradient group 0 times, not once"));
}

TEST(ZeroProgram, FindsASumOfPartsThatAreNotReducedYet) {
  World world = make_zero_world(WorldShape{.degrees = {.data = 2, .pipeline = 2}}, 2);
  Operation sum{
      .kind = OpKind::communicate, .axis = GroupAxis::embedding, .purpose = Purpose::gradient, .bucket = kTiedEmbeddingGradient};
  for (StepProgram& program : world.programs) {
    program.insert(program.begin() + find_operation(program, is_kind(OpKind::gradient_norm)), sum);
    chain(program);
  }
  EXPECT_EQ(all_problems(world), "");

  StepProgram& last = world.programs[3];
  ASSERT_GE(world.expectation.ranks[3].head_chunk, 0);
  const int table = static_cast<int>(world.expectation.ranks[3].bucket_sources.size()) - 1;
  const auto is_tied = [](const Operation& op) { return op.bucket == kTiedEmbeddingGradient; };
  move_before(last, is_tied, is_of_bucket(OpKind::communicate, kGradients, table, 1));
  EXPECT_TRUE(reports(world, "all_reduce tied embedding gradient does not wait for reduce_scatter gradients bucket"));
}

}  // namespace
}  // namespace tandem
