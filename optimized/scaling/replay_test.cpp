// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/replay.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/engine/lower.h"
#include "optimized/scaling/simulator_test_support.h"
#include "reference/pipeline_schedules.h"

namespace tandem {
namespace {

constexpr std::int64_t kSequence = 16;

GptConfig small_model(int layers) {
  GptConfig model;
  model.vocabulary = 64;
  model.sequence = kSequence;
  model.layers = layers;
  model.hidden = 32;
  model.heads = 4;
  return model;
}

TrainingPlan plan_of(ParallelDegrees degrees, std::int64_t rows, int micro_batches) {
  TrainingPlan plan;
  plan.parallel = degrees;
  plan.numerics = numerics_from_precision("fp32");
  plan.batch = {rows, micro_batches};
  return plan;
}

// A second for each of so many FLOPs or bytes, and something for being an operation; by nothing that differs between ranks which
// stand for each other.
double seconds(const Operation& op) {
  if (op.kind == OpKind::optimizer) return 0.37;
  if (op.kind == OpKind::compute) return 1e-6 * op.flops + 0.011 + 0.003 * static_cast<double>(op.part);
  return 2e-6 * static_cast<double>(op.bytes) + 0.07 + 0.01 * static_cast<double>(op.axis);
}

double seconds_at(const Operation& op, int /*stage*/) { return seconds(op); }

void expect_equals_full_world(const TrainingPlan& plan, const GptConfig& model) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < plan.parallel.world_size(); ++rank) programs.push_back(lower(plan, model, kSequence, rank));
  const ProgramTiming world = time_programs(programs, expectation(plan, model, kSequence), seconds);

  const ReplayTiming few = replay(plan, model, kSequence, seconds_at);

  const ProcessGrid grid(plan);
  EXPECT_NEAR(few.step_seconds, world.makespan_seconds, 1e-12 * world.makespan_seconds);
  ASSERT_EQ(std::ssize(few.busy_seconds), plan.parallel.pipeline);
  for (int rank = 0; rank < grid.size(); ++rank) {
    const auto stage = static_cast<std::size_t>(grid.coordinates(rank).pipeline);
    const auto r = static_cast<std::size_t>(rank);
    EXPECT_NEAR(few.busy_seconds[stage], world.busy_seconds[r], 1e-12 * world.makespan_seconds) << "rank " << rank;
    EXPECT_NEAR(few.exposed_seconds[stage], world.exposed_seconds[r], 1e-12 * world.makespan_seconds) << "rank " << rank;
  }
}

TEST(Replay, EqualsTheFullWorldOfDataParallelism) {
  TrainingPlan plan = plan_of({.data = 4}, 8, 2);
  plan.buckets.bucket_bytes = 20000;
  expect_equals_full_world(plan, small_model(3));
  plan.overlap.gradients = true;
  expect_equals_full_world(plan, small_model(3));
}

TEST(Replay, EqualsTheFullWorldOfTensorAndContextParallelism) {
  TrainingPlan plan = plan_of({.data = 2, .tensor = 2}, 4, 2);
  expect_equals_full_world(plan, small_model(2));
  plan.sequence_parallel = true;
  plan.overlap.tensor_chunks = 2;
  plan.overlap.gradients = true;
  expect_equals_full_world(plan, small_model(2));
  plan.parallel = {.data = 1, .tensor = 1, .context = 2};
  plan.sequence_parallel = false;
  plan.overlap = {};
  expect_equals_full_world(plan, small_model(2));
}

TEST(Replay, EqualsTheFullWorldOfEveryPipelineSchedule) {
  for (const auto& [schedule, chunks] :
       std::vector<std::pair<std::string, int>>{{"gpipe", 1}, {"1f1b", 1}, {"interleaved", 2}, {"zb-h1", 1}, {"zb-v", 2}}) {
    TrainingPlan plan = plan_of({.data = 2, .tensor = 2, .pipeline = 3}, 12, 6);
    plan.pipeline = {.schedule = schedule, .chunks = chunks};
    plan.overlap.gradients = true;
    SCOPED_TRACE(schedule);
    expect_equals_full_world(plan, small_model(7));
    plan.rank_order = "pipeline-data-context-tensor";
    expect_equals_full_world(plan, small_model(7));
  }
}

TEST(Replay, EqualsTheFullWorldOfEveryZeroStage) {
  for (int stage = 1; stage <= 3; ++stage) {
    // An untied head: ranks keep unequal parts of a tied table, so that they do not stand for each other to the byte.
    GptConfig model = small_model(4);
    model.tied = false;
    TrainingPlan plan = plan_of({.data = 4, .pipeline = 2}, 16, 4);
    plan.zero_stage = stage;
    plan.overlap.gradients = true;
    SCOPED_TRACE(stage);
    expect_equals_full_world(plan, model);
    plan.overlap = {.gradients = false, .prefetch = false, .tensor_chunks = 1};
    expect_equals_full_world(plan, model);
  }
}

TEST(Replay, EqualsTheFullWorldOfExpertParallelism) {
  GptConfig model = small_model(2);
  model.experts = 4;
  TrainingPlan plan = plan_of({.data = 4, .pipeline = 2, .expert = 2}, 16, 2);
  expect_equals_full_world(plan, model);
}

TEST(Replay, AccountsForEverySecondOfARank) {
  TrainingPlan plan = plan_of({.data = 2, .tensor = 2, .pipeline = 2}, 16, 4);
  plan.overlap.gradients = true;
  plan.buckets.bucket_bytes = 20000;
  const ReplayTiming timing = replay(plan, small_model(4), kSequence, seconds_at);
  for (std::size_t stage = 0; stage < 2; ++stage) {
    EXPECT_LE(timing.busy_seconds[stage] + timing.exposed_seconds[stage], timing.step_seconds * (1 + 1e-12));
    EXPECT_GT(timing.hidden_seconds[stage], 0);
    // What is on its way is hidden or waited for; what is waited for may also be a peer.
    const double waited_for = timing.transfer_seconds[stage] - timing.hidden_seconds[stage];
    EXPECT_LE(waited_for, timing.exposed_seconds[stage] * (1 + 1e-12));
  }
  // The last to end is never idle but at waits.
  EXPECT_NEAR(timing.busy_seconds[0] + timing.exposed_seconds[0], timing.step_seconds, 1e-12 * timing.step_seconds);
  const ReplayTiming twice = replay(plan, small_model(4), kSequence, seconds_at, {},
                                    PitfallSet(std::vector<Pitfall>{Pitfall::communication_counted_twice}));
  EXPECT_GT(twice.hidden_seconds[0], timing.hidden_seconds[0]);
}

// On a device whose products take no time.
double seconds_of_mlp(const TrainingPlan& plan) {
  GptConfig model = small_model(2);
  model.sequence = 4096;  // so many tokens that their matrices count and the weights, which every piece reads, do not
  ClusterSpec cluster = ideal_cluster();
  cluster.device.peak_flops = {{"fp32", 1e30}, {"bf16", 1e30}};
  cluster.device.memory_bytes_per_second = 1e9;
  const OperationCost cost = cost_on(cluster, plan, model, model.sequence);
  double seconds = 0;
  for (const Operation& op : lower(plan, model, model.sequence, 0)) {
    if (op.kind == OpKind::compute && op.part == Part::mlp && op.phase == Phase::forward) seconds += cost(op, 0);
  }
  return seconds;
}

TEST(ReplayCost, PiecesOfAProductShareItsActivationFunction) {
  TrainingPlan plan = plan_of({.tensor = 2}, 4, 2);
  plan.precision = "bf16";
  plan.sequence_parallel = true;
  const double whole = seconds_of_mlp(plan);
  plan.overlap.tensor_chunks = 4;

  EXPECT_GT(whole, 0);
  EXPECT_NEAR(seconds_of_mlp(plan), whole, 0.05 * whole);
}

TEST(Replay, HasTheBubbleOfTheClosedForm) {
  TrainingPlan plan = plan_of({.pipeline = 4}, 8, 8);
  plan.pipeline = {.schedule = "interleaved", .chunks = 2};
  const auto unit = [](const Operation& op, int) {
    const bool ends_pass = (op.phase == Phase::forward && op.part == Part::mlp_merge) ||
                           (op.phase == Phase::backward_input && op.part == Part::norm_1) || op.part == Part::block;
    return op.kind == OpKind::compute && ends_pass ? 1.0 : 0.0;
  };
  const auto idle = [&](const PitfallSet& pitfalls) {
    const ReplayTiming timing = replay(plan, small_model(8), kSequence, unit, {}, pitfalls);
    return 1 - timing.busy_seconds[0] / timing.step_seconds;
  };
  const double expected = reference::pipeline_bubble_share("interleaved", {4, 2, 8});
  EXPECT_NEAR(idle({}), expected, 1e-12);
  EXPECT_GT(idle(PitfallSet(std::vector<Pitfall>{Pitfall::bubble_not_scaled_by_chunks})), expected + 0.05);
}

Operation collective(GroupAxis axis, std::int64_t bytes, bool background) {
  Operation op;
  op.kind = OpKind::communicate;
  op.axis = axis;
  op.bytes = bytes;
  op.background = background;
  return op;
}

Operation work(double flops) {
  Operation op;
  op.flops = flops;
  return op;
}

double by_size(const Operation& op, int /*stage*/) {
  return op.kind == OpKind::communicate ? static_cast<double>(op.bytes) : op.flops;
}
bool all_share(GroupAxis, GroupAxis) { return true; }

TEST(ReplayContention, SharesTheLinkByTime) {
  // Alone 4 s and 2 s. Together from second 1: both at half speed until the short one is through at 5, with 1 of 4 left to do.
  StepProgram program = {collective(GroupAxis::data, 4, true), work(1), collective(GroupAxis::tensor, 2, false), work(0)};
  program.back().after = {0};
  const TrainingPlan plan = plan_of({.data = 2, .tensor = 2}, 4, 1);

  EXPECT_DOUBLE_EQ(replay({program}, plan, by_size).step_seconds, 4);
  const ReplayTiming shared = replay({program}, plan, by_size, all_share);
  EXPECT_DOUBLE_EQ(shared.step_seconds, 6);  // 1 + 2 * 2, then the last second
  EXPECT_DOUBLE_EQ(shared.exposed_seconds[0], 5);
  EXPECT_DOUBLE_EQ(shared.hidden_seconds[0], 1);
  EXPECT_DOUBLE_EQ(shared.transfer_seconds[0], 6);
  EXPECT_DOUBLE_EQ(replay({program}, plan, by_size, [](GroupAxis, GroupAxis) { return false; }).step_seconds, 4);
  const PitfallSet ignored(std::vector<Pitfall>{Pitfall::contention_ignored});
  EXPECT_DOUBLE_EQ(replay({program}, plan, by_size, all_share, ignored).step_seconds, 4);
}

TEST(ReplayContention, OfThreeAxesIsAThird) {
  // 3 s each, together: 9 s, as one after the other; nothing is lost and nothing won.
  StepProgram program = {collective(GroupAxis::data, 3, true), collective(GroupAxis::tensor, 3, true),
                         collective(GroupAxis::context, 3, true), work(0)};
  program.back().after = {0, 1, 2};
  const TrainingPlan plan = plan_of({.data = 2, .tensor = 2, .context = 2}, 4, 1);
  EXPECT_NEAR(replay({program}, plan, by_size, all_share).step_seconds, 9, 1e-12);
  EXPECT_DOUBLE_EQ(replay({program}, plan, by_size).step_seconds, 3);
}

TEST(ReplayContention, SlowsAMessageAtTheSlowerEnd) {
  Operation send = collective(GroupAxis::pipeline, 4, false);
  send.collective = Collective::send;
  send.peer = 1;
  Operation receive = send;
  receive.collective = Collective::recv;
  receive.peer = 0;
  // Stage 1 is busy on its links for 2 s when the message comes, which then takes 2 * 2 + 2 s.
  const std::vector<StepProgram> programs = {{send}, {collective(GroupAxis::tensor, 2, true), receive, work(0)}};
  const TrainingPlan plan = plan_of({.pipeline = 2}, 4, 1);
  EXPECT_DOUBLE_EQ(replay(programs, plan, by_size).step_seconds, 4);
  EXPECT_DOUBLE_EQ(replay(programs, plan, by_size, all_share).step_seconds, 6);
  // The same at the sender's end.
  const std::vector<StepProgram> sends_slowly = {{collective(GroupAxis::tensor, 2, true), send}, {receive, work(0)}};
  EXPECT_DOUBLE_EQ(replay(sends_slowly, plan, by_size, all_share).step_seconds, 6);
}

TEST(Replay, EndsWithWhatIsInTheBackground) {
  const TrainingPlan plan = plan_of({.data = 2}, 4, 1);
  const ReplayTiming timing = replay({{collective(GroupAxis::data, 4, true), work(1)}}, plan, by_size);
  EXPECT_DOUBLE_EQ(timing.step_seconds, 4);
  EXPECT_DOUBLE_EQ(timing.exposed_seconds[0], 3);
}

TEST(Replay, FirstAndLastStageMeetOverTheEmbedding) {
  TrainingPlan plan = plan_of({.pipeline = 3}, 6, 3);
  const Operation tied = collective(GroupAxis::embedding, 2, false);
  const std::vector<StepProgram> programs = {{work(1), tied}, {work(1), tied}, {work(5), tied}};

  const ReplayTiming timing = replay(programs, plan, by_size);
  EXPECT_DOUBLE_EQ(timing.exposed_seconds[0], 6);  // 4 for the last one, 2 for the sum
  EXPECT_DOUBLE_EQ(timing.exposed_seconds[1], 2);  // alone
  EXPECT_DOUBLE_EQ(timing.step_seconds, 7);
  plan.pipeline = {.schedule = "zb-v", .chunks = 2};  // both ends are on the first rank
  EXPECT_DOUBLE_EQ(replay(programs, plan, by_size).exposed_seconds[0], 2);
}

TEST(Replay, RefusesProgramsThatNeverEnd) {
  Operation receive = collective(GroupAxis::pipeline, 4, false);
  receive.collective = Collective::recv;
  receive.peer = 1;
  const TrainingPlan plan = plan_of({.pipeline = 2}, 4, 1);
  EXPECT_THROW((void)replay({{receive}, {work(1)}}, plan, by_size), ContractError);
  EXPECT_THROW((void)replay(std::vector<StepProgram>{{work(1)}}, plan, by_size), ContractError);
}

TEST(CostMeasured, IsTheLinksOwnRule) {
  WorldSettings world;
  world.link = LinkProfile{};
  world.link->ranks_per_node = 2;
  world.link->in_node = {1e-3, 1e6, 0};
  world.link->between_nodes = {5e-3, 1e5, 0};
  TrainingPlan plan = plan_of({.data = 2, .tensor = 2}, 4, 1);
  const OperationCost cost = cost_measured(world, plan, [](const Operation& op) { return op.flops; });
  EXPECT_DOUBLE_EQ(cost(work(3), 0), 3);
  // Tensor ranks lie in one node, data ranks in two. Direct: 2 (a + b / (2 B)).
  EXPECT_NEAR(cost(collective(GroupAxis::tensor, 4000, false), 0), 2 * (1e-3 + 2e-3), 1e-12);
  EXPECT_NEAR(cost(collective(GroupAxis::data, 4000, false), 0), 2 * (5e-3 + 20e-3), 1e-12);
  world.link.reset();
  EXPECT_EQ(cost_measured(world, plan, [](const Operation&) { return 0.0; })(collective(GroupAxis::data, 4000, false), 0), 0);
}

ClusterSpec nodes_of_two() {
  ClusterSpec cluster;
  cluster.name = "made-up";
  cluster.device.peak_flops = {{"bf16", 1e14}};
  cluster.device.memory_bytes_per_second = 1e12;
  NetworkLevel near, far;
  near.devices = 2;
  near.bytes_per_second = 1e11;
  near.latency_seconds = 1e-6;
  far.bytes_per_second = 1e10;
  far.latency_seconds = 1e-5;
  cluster.levels = {near, far};
  return cluster;
}

TEST(CostOn, PricesByShapeAndByPlace) {
  TrainingPlan plan = plan_of({.data = 2, .tensor = 2, .pipeline = 2}, 8, 1);
  plan.precision = "bf16";
  const ClusterSpec cluster = nodes_of_two();
  const GptConfig model = small_model(2);
  const CostModel costs(cluster);
  const OperationCost cost = cost_on(cluster, plan, model, kSequence);
  Operation product = work(2.0 * 64 * 32 * 48);  // 4 rows of 16 tokens, 32 to 3 * 16
  product.part = Part::attention_in;
  product.layer = 0;
  EXPECT_DOUBLE_EQ(cost(product, 0), costs.matmul_seconds(64, 48, 32, "bf16"));
  product.phase = Phase::backward_input;
  EXPECT_DOUBLE_EQ(cost(product, 0), costs.matmul_seconds(64, 32, 48, "bf16"));
  EXPECT_NEAR(cost(collective(GroupAxis::tensor, 1'000'000, false), 0), 2 * (1e-6 + 0.5e6 / 1e11), 1e-12);
  EXPECT_NEAR(cost(collective(GroupAxis::data, 1'000'000, false), 0), 2 * (1e-5 + 0.5e6 / 1e10), 1e-12);
  Operation receive = collective(GroupAxis::pipeline, 1'000'000, false);
  receive.collective = Collective::recv;
  receive.peer = 0;
  EXPECT_NEAR(cost(receive, 1), 1e-5 + 1e6 / 1e10, 1e-12);
}

TEST(SharesLinksOn, TellsAxesThatLeaveTheNodeFromThoseThatDoNot) {
  const SharesLinks shares = shares_links_on(nodes_of_two(), plan_of({.data = 2, .tensor = 2, .pipeline = 2}, 8, 1));
  EXPECT_TRUE(shares(GroupAxis::data, GroupAxis::pipeline));
  EXPECT_FALSE(shares(GroupAxis::data, GroupAxis::tensor));
  EXPECT_FALSE(shares(GroupAxis::context, GroupAxis::context));  // one rank
}

}  // namespace
}  // namespace tandem
