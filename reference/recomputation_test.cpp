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
  EXPECT_NEAR(none / (2048.0 * 12288 * 2), 2 + 4 + 8 + 2, 0.01);
  EXPECT_NEAR(blocked_activation_bytes(model, size, "selective") / none, 10.0 / 16, 0.01);
  EXPECT_NEAR(blocked_activation_bytes(model, size, "full") / none, 1.0 / 16, 0.01);
}

TEST(Recomputation, FullRepeatsAboutAThirdOfTheStep) {
  const GptConfig model = gpt3();
  const RecomputationSize size{2048, 2048, 1, false, 2};
  const double forward = 2 * 2048.0 * 12288 * (12 * 12288 + 2049);

  EXPECT_DOUBLE_EQ(recomputed_flops(model, size, false), forward);
  EXPECT_DOUBLE_EQ(forward - recomputed_flops(model, size, true), 2 * 2048.0 * 12288 * 4 * 12288);
}

TEST(Recomputation, RefusesAnUnknownMode) {
  EXPECT_THROW((void)published_activation_bytes(gpt3(), {}, "some"), ContractError);
  EXPECT_THROW((void)blocked_activation_bytes(gpt3(), {}, "some"), ContractError);
}

}  // namespace
}  // namespace tandem::reference
