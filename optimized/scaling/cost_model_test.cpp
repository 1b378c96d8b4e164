// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/cost_model.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/scaling/layer_cost.h"
#include "optimized/scaling/simulator_test_support.h"
#include "reference/scaling.h"

namespace tandem {
namespace {

TEST(CostModel, RingOnOneLevelIsTheAlphaBetaFormula) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);
  const reference::Link link{1e-6, 1 / 1e11};

  for (const int ranks : {2, 3, 8}) {
    const GroupPlacement group{ranks, {ranks, ranks}, {1, 1}};
    for (const double bytes : {8.0, 1e6, 3e9}) {
      const double sum = reference::ring_all_reduce_seconds(ranks, bytes, link);
      EXPECT_NEAR(costs.collective_seconds(Collective::all_reduce, bytes, group), sum, 1e-12 * sum);
      const double half = reference::ring_half_seconds(ranks, bytes, link);
      EXPECT_NEAR(costs.collective_seconds(Collective::all_gather, bytes, group), half, 1e-12 * half);
      EXPECT_NEAR(costs.collective_seconds(Collective::reduce_scatter, bytes, group), half, 1e-12 * half);
    }
  }
  EXPECT_EQ(costs.collective_seconds(Collective::all_reduce, 1e9, GroupPlacement{1, {1, 1}, {8, 16}}), 0);
}

TEST(CostModel, RanksOfOneNodeBringTheirLinksToARing) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);

  // 16 ranks in 4 nodes: 4 links of 1e10 each leave a node; 15 hops, 3 of them far. Tree: 3 near hops and 2 far ones each way.
  const double gather = 15.0 / 16 * 1e9 / 4e10 + 3 * 5e-6 + 12 * 1e-6;
  EXPECT_NEAR(costs.collective_seconds(Collective::all_gather, 1e9, {16, {4, 16}, {2, 1}}), gather, 1e-12);
  const double tree = 2 * (3.0 / 4 * 1e9 / 4e10 + 2 * 5e-6 + 3 * 1e-6);
  EXPECT_NEAR(costs.collective_seconds(Collective::all_reduce, 1e9, {16, {4, 16}, {2, 1}}), tree, 1e-12);
  // One rank a node: one level alone.
  const double ring = 2 * (255 * 5e-6 + 255.0 / 256 * 8 / 1e10);
  EXPECT_NEAR(costs.collective_seconds(Collective::all_reduce, 8, {256, {1, 256}, {8, 8}}), ring, 1e-12);
}

TEST(CostModel, PlacementCountsTheRanksOfEachNode) {
  const ClusterSpec cluster = ideal_cluster();
  for (const char* order : {"tensor-context-data-pipeline", "tensor-pipeline-context-data", "data-tensor-pipeline-context"}) {
    TrainingPlan plan;
    plan.parallel = {4, 2, 4, 2, 2};
    plan.rank_order = order;
    const ProcessGrid grid(plan);
    for (const GroupAxis axis : {GroupAxis::data, GroupAxis::tensor, GroupAxis::pipeline, GroupAxis::context, GroupAxis::gradient,
                                 GroupAxis::expert, GroupAxis::expert_gradient, GroupAxis::world}) {
      const std::vector<int> members = grid.group(axis, 0);
      const auto near = std::count_if(members.begin(), members.end(), [](int rank) { return rank < 8; });
      const GroupPlacement group = placement(plan, axis, cluster);
      EXPECT_EQ(group.size, std::ssize(members)) << order << " " << name(axis);
      EXPECT_EQ(group.ranks_in_island[0], near) << order << " " << name(axis);
      EXPECT_EQ(group.ranks_in_island[1], group.size);
    }
  }
}

TEST(CostModel, FirstAndLastStageOfANodeAreNeighbours) {
  TrainingPlan plan;
  plan.parallel.data = 2;
  plan.parallel.pipeline = 4;  // ranks 0 and 6 of 8
  EXPECT_EQ(placement(plan, GroupAxis::embedding, ideal_cluster()).ranks_in_island, (std::vector<int>{2, 2}));
}

TEST(CostModel, MessagesTakeTheNearestCommonLevel) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);

  EXPECT_EQ(costs.level_between(0, 7), 0);
  EXPECT_EQ(costs.level_between(7, 8), 1);
  EXPECT_NEAR(costs.message_seconds(1e6, 0), 1e-6 + 1e6 / 1e11, 1e-15);
  EXPECT_NEAR(costs.message_seconds(1e6, 1), 5e-6 + 1e6 / 1e10, 1e-15);
}

TEST(CostModel, ProductsPayForTilesWavesAndDepth) {
  ClusterSpec cluster = ideal_cluster();
  cluster.device.constants["multiprocessors"] = 4;
  cluster.device.constants["matmul_half_depth.bf16"] = 256;
  const CostModel costs(cluster);

  // Four tiles of 256 x 128 on four multiprocessors; k = 256 is half of the rate.
  EXPECT_NEAR(costs.matmul_seconds(512, 256, 256, "bf16"), 2.0 * 512 * 256 * 256 / (kPeak * 0.5), 1e-18);
  // Five of them would leave a second wave with one; smaller tiles fill five waves at 0.8 of the rate.
  EXPECT_NEAR(costs.matmul_seconds(1280, 128, 256, "bf16"), 2.0 * 1280 * 128 * 256 / (kPeak * 0.5 * 0.8), 1e-17);
  EXPECT_GT(costs.matmul_seconds(512, 252, 256, "bf16"), 2 * costs.matmul_seconds(512, 256, 256, "bf16"));
  EXPECT_THROW(static_cast<void>(costs.matmul_seconds(8, 8, 8, "nvfp4")), InputError);
}

TEST(LayerCost, IsTheSumOfItsProductsWhereMemoryIsFree) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);
  Workload workload = small_workload(1, 1, 1, 2);
  workload.plan.recompute.mode = "full";

  const LayerCost layer(workload, costs);
  const PassTriple pass = layer.layer(true);

  const double tokens = 1024, width = 1024, products = 2 * tokens * 12 * width * width / kPeak;
  const double attention = 2 * tokens * 1024 * width / kPeak;  // causal: half of 4 s h a token
  EXPECT_NEAR(pass.forward.compute, products + attention, 1e-12 * products);
  EXPECT_NEAR(pass.backward_input.compute, products + 2.5 * attention, 1e-12 * products);
  EXPECT_NEAR(pass.backward_weight.compute, products, 1e-12 * products);
  EXPECT_NEAR(pass.backward_input.recompute, products + attention, 1e-12 * products);
  EXPECT_EQ(layer.layer(false).backward_input.recompute, 0);
  EXPECT_NEAR(layer.layer_parameters(), 12 * width * width, 1);

  workload.software.product_dtype = "fp8";
  const LayerCost faster(workload, costs);
  EXPECT_NEAR(faster.layer(true).forward.compute, products / 2 + attention, 1e-12 * products);
}

TEST(LayerCost, TensorRanksSumActivationsTwiceEachWay) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);
  const Workload workload = small_workload(1, 4, 1, 1);

  const PassTriple pass = LayerCost(workload, costs).layer(false);

  const double sum = reference::ring_all_reduce_seconds(4, 1024.0 * 1024 * 2, {1e-6, 1 / 1e11});
  EXPECT_NEAR(pass.forward.tensor, 2 * sum, 1e-12 * sum);
  EXPECT_NEAR(pass.backward_input.tensor, 2 * sum, 1e-12 * sum);
}

TEST(LayerCost, FullRecomputationSumsActivationsOnceMore) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);
  Workload workload = small_workload(1, 4, 1, 1);
  workload.plan.recompute.mode = "full";

  const PassTriple pass = LayerCost(workload, costs).layer(true);

  EXPECT_NEAR(pass.backward_input.tensor, 2 * pass.forward.tensor, 1e-15);
}

TEST(LayerCost, ContextRanksPassKeysAndValuesAround) {
  const ClusterSpec cluster = ideal_cluster();
  const CostModel costs(cluster);
  Workload workload = small_workload(1, 1, 1, 1);
  workload.plan.parallel.context = 2;

  const PassTriple pass = LayerCost(workload, costs).layer(false);

  // Half of the tokens' keys and values once to the neighbour, and back with their gradients; attention hides what it can.
  const double forward = 1e-6 + 2 * 512 * 1024 * 2 / 1e11, backward = 1e-6 + 2 * 2 * 512 * 1024 * 2 / 1e11;
  const double attention = 2 * 512.0 * 1024 * 1024 / kPeak;
  EXPECT_NEAR(pass.forward.context + pass.forward.hidden, forward, 1e-15);
  EXPECT_NEAR(pass.forward.context, std::max(0.0, forward - attention / 2), 1e-15);
  EXPECT_NEAR(pass.backward_input.context + pass.backward_input.hidden, backward, 1e-15);
}

TEST(LayerCost, GathersHideBehindComputingAndDisturbIt) {
  ClusterSpec cluster = ideal_cluster();
  cluster.device.constants["overlap_interference"] = 0.25;
  Workload workload = small_workload(8, 1, 1, 1);
  workload.plan.zero_stage = 3;
  const double bytes = 12.0 * 1024 * 1024;
  for (const double bandwidth : {1e9, 1e12}) {  // slower and faster than the layer computes
    cluster.levels[0].bytes_per_second = bandwidth;
    const CostModel costs(cluster);
    const PassTriple pass = LayerCost(workload, costs).layer(false);
    const reference::Link link{1e-6, 1 / bandwidth};
    const double gather = reference::ring_half_seconds(8, 2 * bytes, link);
    const double scatter = reference::ring_half_seconds(8, 4 * bytes, link);
    const auto exposed = [](double communication, double computing) {
      const double behind = std::min(communication, computing);
      return communication - behind + 0.25 * behind;
    };
    EXPECT_NEAR(pass.forward.data, exposed(gather, pass.forward.compute), 1e-12 * gather);
    const double computing = pass.backward_input.compute + pass.backward_weight.compute;
    EXPECT_NEAR(pass.backward_input.data, exposed(gather + scatter, computing), 1e-12 * gather);
  }
}

}  // namespace
}  // namespace tandem
