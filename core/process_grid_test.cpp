// SPDX-License-Identifier: Apache-2.0
#include "core/process_grid.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

TrainingPlan plan_of(const ParallelDegrees& degrees, const std::string& order = "tensor-context-data-pipeline",
                     const std::string& schedule = "1f1b") {
  TrainingPlan plan;
  plan.parallel = degrees;
  plan.rank_order = order;
  plan.pipeline.schedule = schedule;
  return plan;
}

std::vector<GroupAxis> all_axes() {
  std::vector<GroupAxis> axes;
  for (std::size_t i = 0; i < kGroupAxes; ++i) axes.push_back(static_cast<GroupAxis>(i));
  return axes;
}

using Ranks = std::vector<int>;

const ParallelDegrees kAll{.data = 4, .tensor = 2, .pipeline = 3, .context = 2, .expert = 2};

std::vector<std::string> all_orders() {
  std::vector<std::string> axes = {"context", "data", "pipeline", "tensor"};
  std::vector<std::string> orders;
  do {
    orders.push_back(axes[0] + "-" + axes[1] + "-" + axes[2] + "-" + axes[3]);
  } while (std::next_permutation(axes.begin(), axes.end()));
  return orders;
}

TEST(ProcessGrid, NumbersRanksFastestAxisFirst) {
  const ProcessGrid grid(plan_of({.data = 2, .tensor = 2, .pipeline = 2}));

  EXPECT_EQ(grid.size(), 8);
  EXPECT_EQ(grid.rank_of({.tensor = 1}), 1);
  EXPECT_EQ(grid.rank_of({.data = 1}), 2);
  EXPECT_EQ(grid.rank_of({.pipeline = 1}), 4);
  EXPECT_EQ(grid.coordinates(7), (Coordinates{.tensor = 1, .context = 0, .data = 1, .pipeline = 1}));

  const ProcessGrid other(plan_of({.data = 3, .tensor = 2, .pipeline = 2}, "data-pipeline-context-tensor"));
  EXPECT_EQ(other.rank_of({.data = 1}), 1);
  EXPECT_EQ(other.rank_of({.pipeline = 1}), 3);
  EXPECT_EQ(other.rank_of({.tensor = 1}), 6);
}

TEST(ProcessGrid, FindsEveryRankAgainInEveryOrder) {
  ASSERT_EQ(all_orders().size(), 24U);
  for (const std::string& order : all_orders()) {
    const ProcessGrid grid(plan_of(kAll, order));
    for (int rank = 0; rank < grid.size(); ++rank) ASSERT_EQ(grid.rank_of(grid.coordinates(rank)), rank) << order;
  }
}

TEST(ProcessGrid, DealsTheRanksOfEachAxisIntoDisjointGroups) {
  for (const std::string& order : all_orders()) {
    for (const std::string schedule : {"1f1b", "zb-v"}) {
      const ProcessGrid grid(plan_of(kAll, order, schedule));
      for (const GroupAxis axis : all_axes()) {
        for (int rank = 0; rank < grid.size(); ++rank) {
          const Ranks group = grid.group(axis, rank);
          ASSERT_EQ(std::count(group.begin(), group.end(), rank), 1) << name(axis);
          ASSERT_EQ(std::set<int>(group.begin(), group.end()).size(), group.size()) << name(axis);
          for (const int member : group) ASSERT_EQ(grid.group(axis, member), group) << name(axis) << " of " << member;
        }
      }
    }
  }
}

TEST(ProcessGrid, GroupsHaveTheSizesOfTheirAxes) {
  const ProcessGrid grid(plan_of(kAll));
  const std::map<GroupAxis, std::size_t> sizes = {
      {GroupAxis::world, 48},  {GroupAxis::data, 4},   {GroupAxis::tensor, 2},   {GroupAxis::pipeline, 3},
      {GroupAxis::context, 2}, {GroupAxis::expert, 2}, {GroupAxis::gradient, 8}, {GroupAxis::expert_gradient, 4},
      {GroupAxis::model, 12},
  };
  for (const auto& [axis, size] : sizes) {
    for (int rank = 0; rank < grid.size(); ++rank) ASSERT_EQ(grid.group(axis, rank).size(), size) << name(axis);
  }
}

TEST(ProcessGrid, GroupsOfEightRanksByHand) {
  const ProcessGrid grid(plan_of({.data = 2, .tensor = 2, .pipeline = 2, .expert = 2}));  // rank = t + 2 d + 4 p

  EXPECT_EQ(grid.group(GroupAxis::data, 5), (Ranks{5, 7}));
  EXPECT_EQ(grid.group(GroupAxis::tensor, 5), (Ranks{4, 5}));
  EXPECT_EQ(grid.group(GroupAxis::pipeline, 5), (Ranks{1, 5}));
  EXPECT_EQ(grid.group(GroupAxis::context, 5), (Ranks{5}));
  EXPECT_EQ(grid.group(GroupAxis::expert, 5), (Ranks{5, 7}));
  EXPECT_EQ(grid.group(GroupAxis::gradient, 5), (Ranks{5, 7}));
  EXPECT_EQ(grid.group(GroupAxis::expert_gradient, 5), (Ranks{5}));
  EXPECT_EQ(grid.group(GroupAxis::model, 5), (Ranks{0, 1, 4, 5, 2, 3, 6, 7}));  // data slowest
}

TEST(ProcessGrid, ExpertsLieWithinNeighbouringDataRanks) {
  const ProcessGrid grid(plan_of({.data = 6, .context = 2, .expert = 3}));  // rank = c + 2 d

  EXPECT_EQ(grid.expert_coordinate(grid.rank_of({.data = 4})), 1);
  EXPECT_EQ(grid.group(GroupAxis::expert, grid.rank_of({.context = 1, .data = 4})), (Ranks{7, 9, 11}));
  EXPECT_EQ(grid.group(GroupAxis::expert_gradient, grid.rank_of({.data = 4})), (Ranks{2, 3, 8, 9}));
  EXPECT_EQ(grid.group(GroupAxis::model, grid.rank_of({.context = 1, .data = 4})), (Ranks{7, 9, 11}));
}

TEST(ProcessGrid, FirstAndLastStageShareTheTiedEmbedding) {
  const ProcessGrid wrapped(plan_of({.tensor = 2, .pipeline = 4}));  // rank = t + 2 p
  EXPECT_EQ(wrapped.group(GroupAxis::embedding, 1), (Ranks{1, 7}));
  EXPECT_EQ(wrapped.group(GroupAxis::embedding, 7), (Ranks{1, 7}));
  EXPECT_EQ(wrapped.group(GroupAxis::embedding, 3), (Ranks{3}));

  // A V begins and ends on the first rank.
  const ProcessGrid v_shaped(plan_of({.tensor = 2, .pipeline = 4}, "tensor-context-data-pipeline", "zb-v"));
  for (int rank = 0; rank < v_shaped.size(); ++rank) EXPECT_EQ(v_shaped.group(GroupAxis::embedding, rank), (Ranks{rank}));

  const ProcessGrid flat(plan_of({.data = 2}));
  EXPECT_EQ(flat.group(GroupAxis::embedding, 1), (Ranks{1}));
}

TEST(ProcessGrid, RefusesOrdersThatDoNotNameEachAxisOnce) {
  for (const std::string order : {"", "tensor", "tensor-context-data", "tensor-context-data-data",
                                  "tensor-context-data-pipeline-tensor", "tensor-context-data-pipeline-expert",
                                  "tensor-context-data-pipeline-", "tensor_context_data_pipeline", "tensor-context-data-pipe"}) {
    try {
      const ProcessGrid grid(plan_of({}, order));
      ADD_FAILURE() << "accepts '" << order << "'";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("rank_order '" + order + "'"), std::string::npos) << error.what();
    }
  }
}

TEST(ProcessGrid, RefusesRanksOutsideTheWorld) {
  const ProcessGrid grid(plan_of({.data = 2}));
  EXPECT_THROW((void)grid.coordinates(2), ContractError);
  EXPECT_THROW((void)grid.coordinates(-1), ContractError);
}

TEST(GroupAxis, NamesAreDistinct) {
  std::set<std::string> names;
  for (const GroupAxis axis : all_axes()) names.insert(std::string(name(axis)));
  EXPECT_EQ(names.size(), kGroupAxes);
  EXPECT_EQ(name(GroupAxis::expert_gradient), "expert_gradient");
}

}  // namespace
}  // namespace tandem
