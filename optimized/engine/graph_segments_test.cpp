// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/graph_segments.h"

#include <gtest/gtest.h>

#include "core/model_config.h"
#include "core/plan.h"
#include "optimized/engine/lower.h"

namespace tandem {
namespace {

GptConfig model() {
  GptConfig model;
  model.vocabulary = 29;
  model.sequence = 9;
  model.layers = 2;
  model.hidden = 16;
  model.heads = 2;
  model.mlp_hidden = 24;
  return model;
}

StepProgram program_of(int data_ranks, int micro_batches, int zero_stage) {
  TrainingPlan plan;
  plan.parallel.data = data_ranks;
  plan.batch = {4, micro_batches};
  plan.zero_stage = zero_stage;
  plan.overlap.gradients = plan.overlap.prefetch = true;
  return lower(plan, model(), 9, 0);
}

TEST(GraphSegments, AreTheForwardAndTheBackwardPartOfEachMicroBatchWithTheSameKeys) {
  const std::vector<GraphSegment> segments = graph_segments(program_of(1, 2, 0));

  ASSERT_EQ(segments.size(), 4U);
  EXPECT_EQ(segments[0].key, segments[2].key);
  EXPECT_EQ(segments[1].key, segments[3].key);
  EXPECT_NE(segments[0].key, segments[1].key);
  for (std::size_t i = 1; i < segments.size(); ++i) EXPECT_GE(segments[i].begin, segments[i - 1].end);
}

TEST(GraphSegments, HoldNoCommunicationAndWaitForNoneButAtTheirBeginning) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    const StepProgram program = program_of(2, 2, zero_stage);
    const std::vector<GraphSegment> segments = graph_segments(program, 1);
    EXPECT_FALSE(segments.empty());
    for (const GraphSegment& segment : segments) {
      for (OperationId id = segment.begin; id < segment.end; ++id) {
        const Operation& op = program[static_cast<std::size_t>(id)];
        EXPECT_TRUE(op.kind == OpKind::compute || op.kind == OpKind::allocate || op.kind == OpKind::free) << to_string(op);
        if (id == segment.begin) continue;
        for (const OperationId before : op.after) {
          EXPECT_FALSE(program[static_cast<std::size_t>(before)].background) << to_string(op);
        }
      }
    }
  }
}

TEST(GraphSegments, OfOtherSizesHaveOtherKeys) {
  const std::vector<GraphSegment> whole = graph_segments(program_of(1, 1, 0)), halves = graph_segments(program_of(1, 2, 0));

  EXPECT_NE(whole.front().key, halves.front().key);
}

}  // namespace
}  // namespace tandem
