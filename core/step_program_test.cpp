// SPDX-License-Identifier: Apache-2.0
#include "core/step_program.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/step_program_test_support.h"

namespace tandem {
namespace {

using namespace step_program_test;

const WorldShape kPipeline{.degrees = {.pipeline = 2}};
const WorldShape kOneRank{};

// Whether the checker says so; all that it says goes into the test's message where it does not.
class LegalPrograms : public testing::TestWithParam<WorldShape> {};

TEST_P(LegalPrograms, AreProven) { EXPECT_EQ(all_problems(make_world(GetParam())), ""); }

INSTANTIATE_TEST_SUITE_P(
    StepProgram, LegalPrograms,
    testing::Values(kOneRank, WorldShape{.degrees = {.data = 3}}, WorldShape{.degrees = {.tensor = 2}}, kPipeline,
                    WorldShape{.degrees = {.pipeline = 4}, .micro_batches = 5}, WorldShape{.degrees = {.context = 3}},
                    WorldShape{.degrees = {.data = 2, .expert = 2}, .experts = true},
                    WorldShape{.degrees = {.data = 2, .tensor = 2, .pipeline = 2, .context = 2}, .micro_batches = 3},
                    WorldShape{.degrees = {.pipeline = 2}, .chunks = 2},
                    WorldShape{.degrees = {.pipeline = 2}, .chunks = 2, .v_shaped = true},
                    WorldShape{.degrees = {.pipeline = 3}, .chunks = 2, .layers = 7, .v_shaped = true},
                    WorldShape{.head_pieces = 0}));

TEST(ProgramFacts, CountWhatTheProgramsHold) {
  const WorldShape shape{.degrees = {.data = 2, .pipeline = 2}, .layers = 4, .micro_batches = 3};
  const World world = make_world(shape);

  const ProgramFacts facts = check_programs(world.programs, world.expectation);

  EXPECT_EQ(facts.peak_bytes, 3 * 2 * kBlockBytes);  // all micro-batches of two layers
  EXPECT_EQ(facts.peak_in_flight, (std::vector<int>{3, 3, 3, 3}));
  EXPECT_EQ(facts.gradient_bytes, 4 * 3 * kGradientBytes);  // each rank: two layers, and embedding or head
  EXPECT_EQ(facts.wire_bytes[static_cast<std::size_t>(Purpose::gradient)], 4 * 3 * kGradientBytes);
  EXPECT_EQ(facts.wire_bytes[static_cast<std::size_t>(Purpose::activation)], 2 * 2 * 3 * kMessageBytes);
  // Per micro-batch and layer 8 parts forward, 8 backward and the weights; embedding 3; head 1 + 2 * 2 + 2.
  EXPECT_EQ(facts.flops, 2.0 * 3 * (4 * 17 + 3 + 7));
}

TEST(BytesOnWire, FollowTheFormulas) {
  const auto bytes = [](Collective collective, int ranks) {
    Operation op;
    op.kind = OpKind::communicate;
    op.collective = collective;
    op.bytes = 1200;
    return bytes_on_wire(op, ranks);
  };
  EXPECT_EQ(bytes(Collective::all_reduce, 4), 1800);
  EXPECT_EQ(bytes(Collective::all_reduce, 1), 0);
  EXPECT_EQ(bytes(Collective::reduce_scatter, 4), 900);
  EXPECT_EQ(bytes(Collective::all_gather, 3), 800);
  EXPECT_EQ(bytes(Collective::all_to_all, 2), 600);
  EXPECT_EQ(bytes(Collective::broadcast, 4), 900);
  EXPECT_EQ(bytes(Collective::ring_shift, 4), 1200);
  EXPECT_EQ(bytes(Collective::ring_shift, 1), 0);
  EXPECT_EQ(bytes(Collective::send, 4), 1200);
  EXPECT_EQ(bytes(Collective::recv, 4), 0);
  EXPECT_EQ(bytes_on_wire(Operation{.bytes = 5}, 4), 0);  // compute
}

TEST(Names, SayWhatAnOperationIs) {
  const StepProgram program = make_world(kPipeline).programs[0];
  const auto text = [&](const Wanted& wanted) {
    return to_string(program[static_cast<std::size_t>(find_operation(program, wanted))]);
  };

  EXPECT_EQ(text(is_compute(Phase::backward_weight, Part::block, 1, 1)), "backward_weight h.1 mb 1");
  EXPECT_EQ(text(is_compute(Phase::forward, Part::attention_in, 0, 0)), "forward h.0 attention_in mb 0");
  EXPECT_EQ(text(is_message(Collective::send, Phase::forward, 1)), "send forward into stage 1 mb 1 to rank 1");
  EXPECT_EQ(text(is_message(Collective::recv, Phase::backward_input, 0)), "recv backward_input into stage 0 mb 0 from rank 1");
  Operation sum{.kind = OpKind::communicate, .purpose = Purpose::gradient, .bucket = 2};
  EXPECT_EQ(to_string(sum), "all_reduce bucket 2");
  sum.bucket = kTiedEmbeddingGradient;
  EXPECT_EQ(to_string(sum), "all_reduce tied embedding gradient");
  EXPECT_EQ(name(Part::message), "message");
  EXPECT_EQ(name(Part::head_loss), "head_loss");
}

TEST(ProgramWork, FindsAPartThatIsMissing) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[1];
  erase_operation(program, find_operation(program, is_compute(Phase::backward_input, Part::norm_2, 3, 1)));

  EXPECT_TRUE(reports(world, "rank 1: backward_input h.3 norm_2 mb 1 appears 0 times, not once"));
}

TEST(ProgramWork, FindsAPartThatRunsTwice) {
  World world = make_world(kOneRank);
  StepProgram& program = world.programs[0];
  const auto at = program.begin() + find_operation(program, is_compute(Phase::forward, Part::mlp, 2, 0));
  program.insert(at, Operation(*at));

  EXPECT_TRUE(reports(world, "rank 0: forward h.2 mlp mb 0 appears 2 times, not once"));
}

TEST(ProgramWork, FindsPartsOutOfOrder) {
  struct Case {
    Wanted first, second;
    std::string text;
  };
  const std::vector<Case> cases = {
      {is_compute(Phase::forward, Part::norm_1, 1, 0), is_compute(Phase::forward, Part::attention_core, 1, 0),
       "forward h.1 attention_in mb 0 runs before forward h.1 norm_1 mb 0"},
      {is_compute(Phase::forward, Part::head_norm, -1, 0), is_compute(Phase::forward, Part::head_loss, -1, 0, 1),
       "forward head_logits mb 0 runs before forward head_norm mb 0"},
      {is_compute(Phase::backward_input, Part::attention_out, 1, 0), is_compute(Phase::backward_input, Part::attention_in, 1, 0),
       "backward_input h.1 attention_core mb 0 runs before backward_input h.1 attention_out mb 0"},
      {is_compute(Phase::backward_input, Part::norm_1, 2, 0), is_compute(Phase::backward_weight, Part::block, 2, 0),
       "backward_weight h.2 mb 0 runs before backward_input h.2 norm_1 mb 0"},
      {is_compute(Phase::forward, Part::mlp_merge, 3, 1), is_compute(Phase::backward_input, Part::mlp_merge, 3, 1),
       "runs before forward h.3 mlp_merge mb 1"},
  };
  for (const Case& broken : cases) {
    World world = make_world(kOneRank);
    StepProgram& program = world.programs[0];
    move_operation(program, find_operation(program, broken.first), find_operation(program, broken.second));
    EXPECT_TRUE(reports(world, broken.text));
  }
}

TEST(ProgramWork, FindsRingStepsOutOfOrder) {
  World world = make_world(WorldShape{.degrees = {.context = 2}});
  StepProgram& program = world.programs[1];
  move_operation(program, find_operation(program, is_compute(Phase::backward_input, Part::attention_core, 0, 0, 0)),
                 find_operation(program, is_compute(Phase::backward_input, Part::attention_core, 0, 0, 1)));

  EXPECT_TRUE(reports(
      world, "rank 1: backward_input h.0 attention_core mb 0 piece 1 runs before backward_input h.0 attention_core mb 0"));
}

TEST(ProgramWork, FindsWorkThatBelongsToAnotherRank) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[0];
  Operation stray = program[static_cast<std::size_t>(find_operation(program, is_compute(Phase::forward, Part::mlp, 1, 0)))];
  stray.layer = 2;
  program.push_back(stray);

  EXPECT_TRUE(reports(world, "rank 0: forward h.2 mlp mb 0 is no work of this rank"));
}

TEST(ProgramWork, AllowsMicroBatchesWithFewerPiecesOfTheHead) {
  World world = make_world(kOneRank);
  StepProgram& program = world.programs[0];
  for (const Part part : {Part::head_logits, Part::head_loss}) {
    erase_operation(program, find_operation(program, is_compute(Phase::forward, part, -1, 1, 1)));
  }
  EXPECT_EQ(all_problems(world), "");

  erase_operation(program, find_operation(program, is_compute(Phase::forward, Part::head_loss, -1, 0, 1)));
  EXPECT_TRUE(reports(world, "forward head_loss mb 0 piece 1 appears 0 times"));
}

TEST(ProgramWork, FindsADependencyOnALaterOperation) {
  World world = make_world(kOneRank);
  world.programs[0][3].after = {7};

  EXPECT_EQ(all_problems(world), "rank 0: operation 3 (allocate activations h.0 mb 0) waits for 7, which is not before it\n");
}

TEST(StageBoundary, FindsAMissingSend) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[0];
  erase_operation(program, find_operation(program, is_message(Collective::send, Phase::forward, 1)));

  EXPECT_TRUE(reports(world, "rank 0: send forward into stage 1 mb 1 to rank 1 appears 0 times, not once"));
  EXPECT_TRUE(reports(world, "deadlock"));
}

TEST(StageBoundary, FindsASendBeforeItsResult) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[1];
  move_operation(program, find_operation(program, is_message(Collective::send, Phase::backward_input, 0)),
                 find_operation(program, is_compute(Phase::backward_input, Part::norm_1, 2, 0)));

  EXPECT_TRUE(
      reports(world, "rank 1: send backward_input into stage 0 mb 0 to rank 0 runs before backward_input h.2 norm_1 mb 0"));
}

TEST(StageBoundary, FindsForwardBeforeItsInput) {
  World world = make_world(kPipeline);
  StepProgram& program = world.programs[1];
  move_operation(program, find_operation(program, is_message(Collective::recv, Phase::forward, 1)),
                 find_operation(program, is_compute(Phase::forward, Part::norm_1, 2, 1)));

  EXPECT_TRUE(reports(world, "rank 1: forward h.2 norm_1 mb 1 runs before recv forward into stage 1 mb 1 from rank 0"));
}

TEST(StageBoundary, FindsAReceiveOfAnotherStage) {
  World world = make_world(WorldShape{.degrees = {.pipeline = 2}, .chunks = 2});
  StepProgram& program = world.programs[1];
  program[static_cast<std::size_t>(find_operation(program, is_message(Collective::recv, Phase::forward, 0)))].stage = 2;

  EXPECT_TRUE(reports(world, "rank 1: recv forward into stage 2 mb 0 from rank 0 is no message of this rank"));
  EXPECT_TRUE(reports(world, "recv forward into stage 2 mb 0 from rank 0 of 64 bytes meets send forward into stage 1 mb 0"));
}

TEST(StageBoundary, FindsAReceiveFromARankWithoutTheStage) {
  World world = make_world(WorldShape{.degrees = {.pipeline = 4}});
  StepProgram& program = world.programs[2];
  program[static_cast<std::size_t>(find_operation(program, is_message(Collective::recv, Phase::forward, 0)))].peer = 0;

  EXPECT_TRUE(reports(world, "rank 2: recv forward into stage 2 mb 0 from rank 0 names rank 0, but stage 1 is on rank 1"));
}

TEST(StageBoundary, FindsATurnOfTheVOutOfOrder) {
  World world = make_world(WorldShape{.degrees = {.pipeline = 2}, .chunks = 2, .v_shaped = true});
  StepProgram& program = world.programs[1];  // holds stages 1 and 2
  move_operation(program, find_operation(program, is_compute(Phase::forward, Part::mlp_merge, 1, 1)),
                 find_operation(program, is_compute(Phase::forward, Part::norm_1, 2, 1)));

  EXPECT_TRUE(reports(world, "rank 1: forward h.2 norm_1 mb 1 runs before forward h.1 mlp_merge mb 1"));
}

TEST(StageBoundary, TakesTheWrappedLayoutWhereStagesAreNotGiven) {
  World world = make_world(WorldShape{.degrees = {.pipeline = 2}, .chunks = 2});
  for (RankExpectation& expected : world.expectation.ranks) expected.chunk_stages.clear();

  EXPECT_EQ(all_problems(world), "");
}

}  // namespace
}  // namespace tandem
