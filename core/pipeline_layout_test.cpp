// SPDX-License-Identifier: Apache-2.0
#include "core/pipeline_layout.h"

#include <string>

#include <gtest/gtest.h>

namespace tandem {
namespace {

PipelineLayout layout_of(int ranks, int chunks, const std::string& schedule, int layers, const std::string& listed = "") {
  TrainingPlan plan;
  plan.parallel.pipeline = ranks;
  plan.pipeline = {schedule, chunks, listed};
  GptConfig model;
  model.layers = layers;
  return pipeline_layout(plan, model);
}

TEST(PipelineLayout, DealsLayersEvenlyLargerStagesFirst) {
  const PipelineLayout layout = layout_of(3, 1, "1f1b", 8);

  EXPECT_EQ(layout.layers, (std::vector<Interval>{{0, 3}, {3, 6}, {6, 8}}));
  EXPECT_EQ(layout.stages(), 3);
}

TEST(PipelineLayout, TakesTheLayersOfEachStageAsListed) {
  EXPECT_EQ(layout_of(2, 2, "interleaved", 8, "3-2-2-1").layers, (std::vector<Interval>{{0, 3}, {3, 5}, {5, 7}, {7, 8}}));
}

TEST(PipelineLayout, WrapsChunksAroundTheRanks) {
  const PipelineLayout layout = layout_of(3, 2, "interleaved", 6);

  EXPECT_EQ(layout.stage_of(1, 0), 1);
  EXPECT_EQ(layout.stage_of(1, 1), 4);
  EXPECT_TRUE(layout.holds_embedding(0));
  EXPECT_FALSE(layout.holds_embedding(1));
  EXPECT_TRUE(layout.holds_head(2));
  EXPECT_FALSE(layout.holds_head(0));
}

TEST(PipelineLayout, PlacesTheChunksOfZbVAsAV) {
  const PipelineLayout layout = layout_of(3, 2, "zb-v", 6);

  EXPECT_EQ(layout.stage_of(0, 1), 5);
  EXPECT_EQ(layout.stage_of(2, 0), 2);
  EXPECT_EQ(layout.stage_of(2, 1), 3);
  EXPECT_TRUE(layout.holds_embedding(0));
  EXPECT_TRUE(layout.holds_head(0));
  EXPECT_FALSE(layout.holds_head(2));
}

TEST(PipelineLayout, FindsRankAndChunkOfEveryStageAgain) {
  for (const std::string schedule : {"1f1b", "interleaved", "zb-v"}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      const int chunks = schedule == "1f1b" ? 1 : schedule == "zb-v" ? 2 : 3;
      const PipelineLayout layout = layout_of(ranks, chunks, schedule, 2 * ranks * chunks + 1);
      std::int64_t next = 0;
      for (int stage = 0; stage < layout.stages(); ++stage) {
        ASSERT_EQ(layout.stage_of(layout.rank_of_stage(stage), layout.chunk_of_stage(stage)), stage) << schedule << ranks;
        ASSERT_EQ(layout.layers[static_cast<std::size_t>(stage)].begin, next);
        next = layout.layers[static_cast<std::size_t>(stage)].end;
      }
      ASSERT_EQ(next, 2 * ranks * chunks + 1);
    }
  }
}

TEST(StageLayers, ReadsListsOfNumbers) {
  EXPECT_EQ(parse_stage_layers("3-2-2-1"), (std::vector<int>{3, 2, 2, 1}));
  EXPECT_EQ(parse_stage_layers("12"), (std::vector<int>{12}));
  EXPECT_EQ(parse_stage_layers(""), std::vector<int>{});
}

TEST(StageLayers, GivesNothingForOtherText) {
  for (const std::string text : {"-", "3-", "-3", "3--2", "3,2", "3-x", "a", "3 - 2", "99999999999"}) {
    EXPECT_FALSE(parse_stage_layers(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace tandem
