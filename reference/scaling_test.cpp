// SPDX-License-Identifier: Apache-2.0
#include "reference/scaling.h"

#include <cmath>

#include <gtest/gtest.h>

#include "core/error.h"
#include "reference/collectives.h"
#include "reference/pipeline_schedules.h"

namespace tandem::reference {
namespace {

constexpr Link kLink = {2e-3, 1e-6};  // a kilobyte a millisecond

TEST(ScalingCollectives, ByHand) {
  EXPECT_DOUBLE_EQ(ring_all_reduce_seconds(4, 8000, kLink), 24e-3);  // 6 (2 + 2)
  EXPECT_DOUBLE_EQ(ring_half_seconds(4, 8000, kLink), 12e-3);
  EXPECT_DOUBLE_EQ(tree_all_reduce_seconds(4, 8000, kLink), 40e-3);  // 4 (2 + 8)
  EXPECT_DOUBLE_EQ(tree_all_reduce_seconds(5, 8000, kLink), 60e-3);  // ceil(log2 5) = 3
  EXPECT_DOUBLE_EQ(all_to_all_seconds(4, 8000, kLink), 12e-3);
  // 3 nodes of 2: in the node 1 (1 + 3) ms and back; between nodes 3 kB, 4 (5 + 1) ms.
  EXPECT_DOUBLE_EQ(hierarchical_all_reduce_seconds(3, 2, 6000, {1e-3, 1e-6}, {5e-3, 1e-6}), 32e-3);
  EXPECT_EQ(ring_all_reduce_seconds(1, 8000, kLink), 0);
  EXPECT_EQ(tree_all_reduce_seconds(1, 8000, kLink), 0);
  EXPECT_THROW((void)ring_half_seconds(0, 8000, kLink), ContractError);
}

// Two derivations of one number, of two files that do not know each other.
TEST(ScalingCollectives, AreThoseOfTheCollectivesReference) {
  for (int ranks = 2; ranks <= 16; ++ranks) {
    const AlphaBeta same = {2e-3, 1e6};
    EXPECT_NEAR(ring_all_reduce_seconds(ranks, 12345, kLink), reference::ring_all_reduce_seconds(ranks, 12345, same), 1e-12);
    EXPECT_NEAR(ring_half_seconds(ranks, 12345, kLink), ring_parts_seconds(ranks, 12345, same), 1e-12);
  }
  const TwoLevels two = {.nodes = 3, .ranks_per_node = 4, .near = {1e-4, 4e6}, .far = {2e-3, 1e6}};
  EXPECT_NEAR(hierarchical_all_reduce_seconds(3, 4, 48000, {1e-4, 0.25e-6}, kLink),
              reference::hierarchical_all_reduce_seconds(48000, two), 1e-12);
}

TEST(ScalingBubble, IsThatOfTheSchedules) {
  EXPECT_DOUBLE_EQ(bubble_share(4, 9, 1), 0.25);  // 3 / (9 + 3)
  EXPECT_DOUBLE_EQ(bubble_share(4, 8, 3), 1.0 / 9);
  EXPECT_DOUBLE_EQ(bubble_share(1, 7, 1), 0);
  EXPECT_DOUBLE_EQ(bubble_share(4, 8, 2), pipeline_bubble_share("interleaved", {4, 2, 8}));
  // A bubble that ignores the chunks, or divides all of it by them, is another number.
  EXPECT_GT(std::abs(bubble_share(4, 8, 2) - 3.0 / 11), 0.1);
  EXPECT_GT(std::abs(bubble_share(4, 8, 2) - 3.0 / 11 / 2), 0.01);
}

// Rajbhandari et al. state, for 7.5 billion parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB.
TEST(ScalingZero, IsWhatThePaperStates) {
  EXPECT_NEAR(zero_model_state_bytes(7.5e9, 64, 0) / 1e9, 120, 0.05);
  EXPECT_NEAR(zero_model_state_bytes(7.5e9, 64, 1) / 1e9, 31.4, 0.05);
  EXPECT_NEAR(zero_model_state_bytes(7.5e9, 64, 2) / 1e9, 16.6, 0.05);
  EXPECT_NEAR(zero_model_state_bytes(7.5e9, 64, 3) / 1e9, 1.9, 0.05);
  EXPECT_DOUBLE_EQ(zero_model_state_bytes(10, 5, 2, 8), 40);  // 2 * 10 + 10 * 10 / 5
  EXPECT_THROW((void)zero_model_state_bytes(10, 5, 4), ContractError);
}

TEST(ScalingActivations, AreThoseOfTheTable) {
  // s 8, b 1, h 4, a 2: s b h = 32, 5 a s / h = 20.
  LayerSize layer{.sequence = 8, .rows = 1, .hidden = 4, .heads = 2};
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::none), 32 * 54);
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::selective), 32 * 34);
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::full), 64);
  layer.tensor = 2;
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::none), 32 * (10 + 12 + 10));
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::selective), 32 * 22);
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::full), 64);
  layer.sequence_parallel = true;
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::none), 16 * 54);
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::selective), 16 * 34);
  EXPECT_DOUBLE_EQ(layer_activation_bytes(layer, Recomputation::full), 32);
}

// Narayanan et al., table 1: 174.6 billion parameters, 96 layers of 12288; 1 trillion: 128 of 25600.
TEST(ScalingGpt, ParametersAreThoseOfTheTable) {
  const GptSize large{.rows = 1536, .sequence = 2048, .layers = 96, .hidden = 12288, .vocabulary = 51200};
  const GptSize largest{.rows = 3072, .sequence = 2048, .layers = 128, .hidden = 25600, .vocabulary = 51200};
  EXPECT_NEAR(gpt_parameters_closed_form(large) / 1e9, 174.6, 0.05);
  EXPECT_NEAR(gpt_parameters_closed_form(largest) / 1e9, 1008.0, 0.05);
}

// Element by element for a model small enough to write down: V 7, s 3, h 2, L 1. Tables 14 + 6; block: norms 8, query-key-value
// 4 * 3 + 6, projection 4 + 2, MLP 16 + 8 + 16 + 2; the closed form leaves the final norm out.
TEST(ScalingGpt, ParametersByHand) {
  const GptSize small{.rows = 1, .sequence = 3, .layers = 1, .hidden = 2, .vocabulary = 7};
  EXPECT_DOUBLE_EQ(gpt_parameters_closed_form(small), 14 + 6 + 8 + 18 + 6 + 42);
}

TEST(ScalingGpt, FlopsByHand) {
  // Forward per token: products 24 h^2 L = 96, attention 4 s h L = 24, head 2 h V = 28; 3 tokens; training three times that.
  const GptSize small{.rows = 1, .sequence = 3, .layers = 1, .hidden = 2, .vocabulary = 7};
  EXPECT_DOUBLE_EQ(gpt_step_flops(small, false), 3 * 3 * (96 + 24 + 28));
  EXPECT_DOUBLE_EQ(gpt_step_flops(small, true), 3 * (4 * (96 + 24) + 3 * 28));
  // Counting the head four times too, as a wrong denominator of the last term does, is another number.
  EXPECT_NE(gpt_step_flops(small, true), 3 * 4 * (96 + 24 + 28));
}

TEST(ScalingShare, GrowsFromLittleToMost) {
  // 8 kB at a kilobyte a millisecond: two ranks 2 (2 + 4) = 12 ms beside 216 ms / 2; four 24 ms beside 54.
  EXPECT_DOUBLE_EQ(communication_share(0.216, 2, 8000, kLink), 0.1);
  EXPECT_DOUBLE_EQ(communication_share(0.216, 4, 8000, kLink), 24.0 / 78);
  EXPECT_GT(communication_share(0.216, 16, 8000, kLink), 0.5);
  EXPECT_DOUBLE_EQ(communication_share(0.216, 1, 8000, kLink), 0);
}

}  // namespace
}  // namespace tandem::reference
