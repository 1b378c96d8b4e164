// SPDX-License-Identifier: Apache-2.0
#include "reference/recomputation.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

// GPT-3 175B with micro-batches of one row, as the paper's table of configurations has it.
GptConfig gpt3() {
  GptConfig model;
  model.hidden = 12288;
  model.heads = 96;
  model.sequence = 2048;
  return model;
}

TEST(Recomputation, PublishedFormulasGiveThePapersShares) {
  const GptConfig model = gpt3();
  const RecomputationSize parallel{2048, 2048, 8, false, 2};
  RecomputationSize sequence = parallel;
  sequence.sequence_parallel = true;
  const double tensor = published_activation_bytes(model, parallel, "none");

  EXPECT_DOUBLE_EQ(published_activation_bytes(model, {2048, 2048, 1, false, 2}, "none"),
                   2048.0 * 12288 * (34 + 5.0 * 96 * 2048 / 12288));
  // Section 5: attention's share 5 a s / h is 80, so that selective recomputation removes 70 % of it all.
  EXPECT_NEAR(1 - 34.0 / (34 + 80), 0.70, 0.01);
  EXPECT_NEAR(published_activation_bytes(model, sequence, "none") / tensor, (34 + 80) / 8.0 / (10 + 24 / 8.0 + 80 / 8.0), 1e-12);
  EXPECT_NEAR(published_activation_bytes(model, sequence, "selective"), 2048.0 * 12288 * 34 / 8, 1);
  EXPECT_DOUBLE_EQ(published_activation_bytes(model, sequence, "full"), 2 * 2048.0 * 12288);
}

TEST(Recomputation, BlockedAttentionKeepsNoMatrix) {
  const GptConfig model = gpt3();
  const RecomputationSize size{2048, 2048, 1, false, 2};
  const double none = blocked_activation_bytes(model, size, "none");

  EXPECT_LT(none, 0.4 * published_activation_bytes(model, size, "none"));
  // In 16 bits beside 100 statistics of 32 bits a token.
  EXPECT_DOUBLE_EQ(none, 2048.0 * (12288 * 2 * (2 + 4 + 8 + 2) + 100 * 4));
  EXPECT_NEAR(blocked_activation_bytes(model, size, "selective") / none, 10.0 / 16, 0.01);
  EXPECT_NEAR(blocked_activation_bytes(model, size, "full") / none, 1.0 / 16, 0.01);
}

// 2 rows of 5 tokens, h = 12, 6 heads, f = 20: numbers small enough to be added up by hand.
GptConfig small_model() {
  GptConfig model;
  model.hidden = 12;
  model.heads = 6;
  model.mlp_hidden = 20;
  return model;
}

TEST(Recomputation, ActivationsOfALayerAddUp) {
  const GptConfig model = small_model();
  const RecomputationSize fp32{10, 5, 1, false, 4};
  // out 480 + middle 480 + statistics 160 + qkv and output 1920 + log-sum-exp 240 + before GELU 800
  EXPECT_EQ(activation_bytes(model, fp32, "selective"), 4080);
  // + norms 960 + after GELU 800
  EXPECT_EQ(activation_bytes(model, fp32, "none"), 5840);
  EXPECT_EQ(activation_bytes(model, fp32, "full"), 480);
  const RecomputationSize fp64{10, 5, 1, false, 8};
  EXPECT_EQ(activation_bytes(model, fp64, "none"), 2 * 5840);
  // Half but for the statistics: 160 and 240 stay.
  const RecomputationSize bf16{10, 5, 1, false, 2};
  EXPECT_EQ(activation_bytes(model, bf16, "none"), (5840 - 400) / 2 + 400);
  EXPECT_EQ(activation_bytes(model, bf16, "full"), 240);
}

TEST(Recomputation, MaterializedAttentionKeepsAMatrixAHeadUnlessItIsMadeAgain) {
  const GptConfig model = small_model();
  RecomputationSize size{10, 5, 1, false, 4};
  size.materialized = true;
  // 2 rows, 6 heads, 5 x 5, 4 bytes in place of the log-sum-exp.
  EXPECT_EQ(activation_bytes(model, size, "none"), 5840 - 240 + 2 * 6 * 25 * 4);
  EXPECT_EQ(activation_bytes(model, size, "selective"), 4080 - 240);
  EXPECT_EQ(activation_bytes(model, size, "full"), 480);
  EXPECT_EQ(blocked_activation_bytes(model, size, "none"), 5840);
  size.tensor_ranks = 2;
  size.bytes = 2;
  RecomputationSize blocked = size;
  blocked.materialized = false;
  EXPECT_EQ(activation_bytes(model, size, "none") - activation_bytes(model, blocked, "none"), 2 * 3 * 25 * 2 - 2 * 3 * 5 * 4);
}

TEST(Recomputation, TensorRanksDivideWidthsAndSequenceParallelismTheStream) {
  const GptConfig model = small_model();
  const RecomputationSize tensor{10, 5, 2, false, 4};
  // out 480 + middle 480 + statistics 160 + 960 + 120 + 400, then norms 960 + 400
  EXPECT_EQ(activation_bytes(model, tensor, "selective"), 2600);
  EXPECT_EQ(activation_bytes(model, tensor, "none"), 3960);
  EXPECT_EQ(activation_bytes(model, tensor, "full"), 480);
  const RecomputationSize sequence{10, 5, 2, true, 4};
  // out, middle and statistics halved; the norms' outputs are gathered, so whole.
  EXPECT_EQ(activation_bytes(model, sequence, "selective"), 2600 - 560);
  EXPECT_EQ(activation_bytes(model, sequence, "none"), 3960 - 560);
  EXPECT_EQ(activation_bytes(model, sequence, "full"), 240);
}

TEST(Recomputation, ExpertsKeepTheirPlaces) {
  GptConfig model = small_model();
  model.experts = 4;
  model.expert_choices = 2;
  model.capacity_factor = 1.0;  // ceil(2 * 5 / 4) = 3 places for an expert and row
  RecomputationSize size{10, 5, 1, false, 4};
  const double dense = 4080 - 800;
  // probabilities and gates 240, experts' input 4 * 6 * 12 * 4 = 1152, before GELU 4 * 6 * 20 * 4 = 1920, output 1152
  EXPECT_EQ(activation_bytes(model, size, "selective"), dense + 240 + 1152 + 1920 + 1152);
  EXPECT_EQ(activation_bytes(model, size, "none"), dense + 240 + 1152 + 1920 + 1152 + 960 + 1920);
  EXPECT_EQ(activation_bytes(model, size, "full"), 480);
  // Two ranks with two experts each: half the experts, twice the rows.
  size.expert_ranks = 2;
  EXPECT_EQ(activation_bytes(model, size, "none"), dense + 240 + 1152 + 1920 + 1152 + 960 + 1920);
  // The other rank has one row: what this rank's experts receive is 3 rows' places instead of 4.
  size.expert_group_rows = 3;
  EXPECT_EQ(activation_bytes(model, size, "none"), dense + 240 + (1152 + 1920 + 1920) * 3 / 4 + 1152 + 960);
}

TEST(Recomputation, TermsExplainTheDifferenceFromThePublishedBytes) {
  const GptConfig model = gpt3();
  for (const std::string_view mode : {"none", "selective", "full"}) {
    for (const bool materialized : {false, true}) {
      for (const int ranks : {1, 2, 8}) {
        for (const bool sequence : {false, true}) {
          const RecomputationSize size{4096, 2048, ranks, sequence && ranks > 1, 2, materialized};
          double explained = published_activation_bytes(model, size, mode);
          for (const ByteTerm& term : differences_from_published(model, size, mode)) explained += term.bytes;
          EXPECT_DOUBLE_EQ(explained, activation_bytes(model, size, mode)) << mode << materialized << ranks << sequence;
        }
      }
    }
  }
}

TEST(Recomputation, TermsAreForWhatIsPublishedAlone) {
  EXPECT_THROW((void)differences_from_published(gpt3(), {2048, 2048, 1, false, 4}, "none"), ContractError);
  EXPECT_THROW((void)differences_from_published(small_model(), {10, 5, 1, false, 2}, "none"), ContractError);
}

TEST(Recomputation, FullRepeatsAboutAThirdOfTheStep) {
  const GptConfig model = gpt3();
  const RecomputationSize size{2048, 2048, 1, false, 2};
  const double forward = 2 * 2048.0 * 12288 * (12 * 12288 + 2049);

  EXPECT_DOUBLE_EQ(recomputed_flops(model, size, false), forward);
  EXPECT_DOUBLE_EQ(attention_core_flops(model, size), forward - 2 * 2048.0 * 12288 * 12 * 12288);
  EXPECT_DOUBLE_EQ(forward - recomputed_flops(model, size, true), 2 * 2048.0 * 12288 * 4 * 12288);
}

TEST(Recomputation, RefusesAnUnknownMode) {
  EXPECT_THROW((void)published_activation_bytes(gpt3(), {}, "some"), ContractError);
  EXPECT_THROW((void)activation_bytes(gpt3(), {}, "some"), ContractError);
}

}  // namespace
}  // namespace tandem::reference
