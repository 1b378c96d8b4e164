// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/step_program.h"
#include "core/step_program_test_support.h"

namespace tandem {
namespace {

using namespace step_program_test;

// One second for each part of a forward and two for the rest.
double seconds(const Operation& op) {
  if (op.kind == OpKind::communicate) return 0.5;
  if (op.kind == OpKind::optimizer) return 4;
  return op.phase == Phase::forward ? 1 : 2;
}

Operation compute(Phase phase = Phase::forward) { return {.phase = phase}; }
Operation talk(Collective collective, int peer = -1) {
  return {.kind = OpKind::communicate, .collective = collective, .axis = GroupAxis::data, .peer = peer};
}

ProgramExpectation ranks_of_one_group(int ranks) {
  ProgramExpectation expectation;
  expectation.ranks.resize(static_cast<std::size_t>(ranks));
  expectation.group = [ranks](GroupAxis, int) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
    return all;
  };
  return expectation;
}

TEST(ProgramTime, LetsTheSenderGoOnAndTheReceiverWait) {
  const std::vector<StepProgram> programs = {{compute(), talk(Collective::send, 1), compute(), compute()},
                                             {talk(Collective::recv, 0), compute(Phase::backward_input)}};

  const ProgramTiming timing = time_programs(programs, ranks_of_one_group(2), seconds);

  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 3.5);  // sent at 1, there at 1.5, two seconds of work
  EXPECT_EQ(timing.busy_seconds, (std::vector<double>{3, 2}));
  EXPECT_DOUBLE_EQ(timing.bubble_share, 1 - 5.0 / 7);
}

TEST(ProgramTime, StartsCollectivesWhenTheLastRankArrives) {
  const Operation optimizer{.kind = OpKind::optimizer};
  const std::vector<StepProgram> programs = {{compute(), talk(Collective::all_reduce), optimizer},
                                             {compute(), compute(), compute(), talk(Collective::all_reduce), optimizer},
                                             {talk(Collective::all_reduce), compute()}};

  const ProgramTiming timing = time_programs(programs, ranks_of_one_group(3), seconds);

  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 7.5);
  EXPECT_EQ(timing.busy_seconds, (std::vector<double>{5, 7, 1}));
}

TEST(ProgramTime, GivesTheBubbleOfGpipe) {
  const int ranks = 4;
  const int micro_batches = 6;
  const World world = make_world(WorldShape{.degrees = {.pipeline = ranks}, .micro_batches = micro_batches});
  // Only one part of each block takes time, forward 1 and backward 2.
  const auto only_mlp = [](const Operation& op) {
    if (op.kind != OpKind::compute || op.part != Part::mlp) return 0.0;
    return op.phase == Phase::forward ? 1.0 : 2.0;
  };

  const ProgramTiming timing = time_programs(world.programs, world.expectation, only_mlp);

  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 3.0 * (micro_batches + ranks - 1));
  EXPECT_NEAR(timing.bubble_share, (ranks - 1.0) / (micro_batches + ranks - 1), 1e-12);
}

TEST(ProgramTime, RefusesProgramsThatDoNotEnd) {
  const std::vector<StepProgram> programs = {{talk(Collective::recv, 1)}, {talk(Collective::recv, 0)}};
  EXPECT_THROW((void)time_programs(programs, ranks_of_one_group(2), seconds), ContractError);
}

// In the background.
Operation meanwhile(std::vector<OperationId> after = {}, GroupAxis axis = GroupAxis::data) {
  Operation op = talk(Collective::all_reduce);
  op.background = true;
  op.axis = axis;
  op.after = std::move(after);
  return op;
}

Operation behind(Operation op, std::vector<OperationId> after) {
  op.after = std::move(after);
  return op;
}

using Times = std::vector<double>;

TEST(ProgramTime, CountsTheTimeThatARankWaitsForCommunication) {
  const std::vector<StepProgram> programs = {{compute(), talk(Collective::all_reduce), talk(Collective::send, 1)},
                                             {compute(), compute(), talk(Collective::all_reduce), talk(Collective::recv, 0)}};

  const ProgramTiming timing = time_programs(programs, ranks_of_one_group(2), seconds);

  EXPECT_EQ(timing.exposed_seconds, (Times{1.5, 1}));  // rank 0 for rank 1 too
  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 3);
}

TEST(ProgramTime, HidesTheBackgroundBehindCompute) {
  for (const bool in_time : {true, false}) {
    StepProgram program = {compute(), meanwhile({0})};
    if (in_time) program.push_back(compute());
    program.push_back(behind(compute(), {1}));
    const std::vector<StepProgram> programs = {program, program};

    const ProgramTiming timing = time_programs(programs, ranks_of_one_group(2), seconds);

    EXPECT_DOUBLE_EQ(timing.makespan_seconds, in_time ? 3 : 2.5);
    EXPECT_EQ(timing.exposed_seconds, in_time ? (Times{0, 0}) : (Times{0.5, 0.5}));
  }
}

TEST(ProgramTime, StartsTheBackgroundWhenTheLastRankHasIssuedIt) {
  const std::vector<StepProgram> programs = {{meanwhile(), compute(), behind(compute(), {0})},
                                             {compute(), compute(), meanwhile(), behind(compute(), {2})}};

  const ProgramTiming timing = time_programs(programs, ranks_of_one_group(2), seconds);

  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 3.5);
  EXPECT_EQ(timing.exposed_seconds, (Times{1.5, 0.5}));
}

TEST(ProgramTime, CarriesOutTheOperationsOfOneGroupOneAfterTheOther) {
  const auto makespan = [](const StepProgram& program) {
    return time_programs({program, program}, ranks_of_one_group(2), seconds).makespan_seconds;
  };
  EXPECT_DOUBLE_EQ(makespan({meanwhile(), meanwhile(), meanwhile(), behind(compute(), {2})}), 2.5);
  EXPECT_DOUBLE_EQ(makespan({meanwhile(), meanwhile({}, GroupAxis::world), behind(compute(), {0, 1})}), 1.5);
  // A rank that waits at once waits for what is in the background before it.
  EXPECT_DOUBLE_EQ(makespan({meanwhile(), meanwhile(), talk(Collective::all_reduce), behind(compute(), {0, 1})}), 2.5);
}

TEST(ProgramTime, LetsTheBackgroundItselfWaitForWhatItNames) {
  const StepProgram program = {meanwhile(), meanwhile({0}, GroupAxis::world), compute(), behind(compute(), {1})};
  const ProgramTiming timing = time_programs({program, program}, ranks_of_one_group(2), seconds);
  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 2.5);
  EXPECT_EQ(timing.exposed_seconds, (Times{0.5, 0.5}));
}

TEST(ProgramTime, EndsWhenTheBackgroundDoes) {
  const StepProgram program = {compute(), meanwhile({0})};
  const ProgramTiming timing = time_programs({program, program}, ranks_of_one_group(2), seconds);
  EXPECT_DOUBLE_EQ(timing.makespan_seconds, 1.5);
  EXPECT_EQ(timing.exposed_seconds, (Times{0.5, 0.5}));
  EXPECT_THROW((void)time_programs({program, {}}, ranks_of_one_group(2), seconds), ContractError);
}

TEST(ProgramTime, GivesTheOverlapOfBucketsWithTheBackwardPass) {
  const WorldShape shape{.degrees = {.data = 2}, .layers = 6, .micro_batches = 1};
  const auto of_buckets = [](double bucket_seconds) {
    return [=](const Operation& op) {
      if (op.kind == OpKind::communicate) return op.bucket >= 0 ? bucket_seconds : 0.0;
      return op.kind == OpKind::compute && op.phase == Phase::backward_weight && op.layer >= 0 ? 2.0 : 0.0;
    };
  };
  const auto time = [&](const World& world, double bucket_seconds) {
    return time_programs(world.programs, world.expectation, of_buckets(bucket_seconds)).makespan_seconds;
  };
  const World plain = make_world(shape);
  const World overlapped = make_overlapped_world(shape, 0);
  // A bucket for each layer and one for what is outside, which is complete with the last layer.
  EXPECT_DOUBLE_EQ(time(plain, 1), 12 + 7);
  EXPECT_DOUBLE_EQ(time(overlapped, 1), 12 + 2);
  EXPECT_DOUBLE_EQ(time(overlapped, 5), 2 + 7 * 5);  // never idle from the first bucket on
}

}  // namespace
}  // namespace tandem
