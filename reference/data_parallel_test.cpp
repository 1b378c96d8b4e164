// SPDX-License-Identifier: Apache-2.0
#include "reference/data_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "reference/test_support.h"

namespace tandem::reference {
namespace {

GptConfig model_with_dropout() {
  GptConfig model{.vocabulary = 13, .sequence = 10, .layers = 2, .hidden = 12, .heads = 3, .mlp_hidden = 20};
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  return model;
}

/// Rows with very different numbers of valid tokens, one with none: 5 rows, so that 7 ranks leave two without any.
Batch skewed_batch(const GptConfig& model) { return ragged_batch(model, 10, {10, 1, 0, 4, 2}, 6); }

constexpr DropoutStep kDropout{17, 2};

using Layout = std::tuple<int, int>;
class LockstepRanks : public testing::TestWithParam<Layout> {};

TEST_P(LockstepRanks, GiveTheGradientOfOneRank) {
  const auto [ranks, micro_batches] = GetParam();
  const GptConfig model = model_with_dropout();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = skewed_batch(model);
  const auto expected = data_parallel_gradients<double>(model, parameters, batch, {1, 1}, kDropout);

  std::vector<RankGradients<double>> states = local_gradients<double>(model, parameters, batch, {ranks, micro_batches}, kDropout);
  const NamedTensors<double> of_rank_0 = states.front().gradients;
  all_reduce_sum(states);

  // Sums over rows in another order: a few roundings of 1e-16 over 17 valid tokens.
  EXPECT_NEAR(states.front().loss, expected.loss, 1e-12 * expected.loss);
  EXPECT_LE(worst_deviation(states.front().gradients, expected.gradients), 1e-12);
  for (const RankGradients<double>& state : states) EXPECT_EQ(state.gradients, states.front().gradients);
  EXPECT_EQ(worst_deviation(of_rank_0, expected.gradients) > 0.1, ranks > 1) << "the reduction must be what makes them equal";
}

INSTANTIATE_TEST_SUITE_P(Layouts, LockstepRanks, testing::Combine(testing::Values(1, 2, 3, 4, 7), testing::Values(1, 3)),
                         [](const auto& instance) {
                           return fmt::format("ranks{}_accum{}", std::get<0>(instance.param), std::get<1>(instance.param));
                         });

TEST(LockstepRanks, WithoutRowsHoldZeros) {
  const GptConfig model = model_with_dropout();
  const auto states = local_gradients<double>(model, lively_parameters(model, 1), skewed_batch(model), {7, 3}, kDropout);

  EXPECT_EQ(states[5].gradients, zero_tensors<double>(model));
  EXPECT_EQ(states[6].loss, 0.0);
  EXPECT_NE(states[0].gradients, zero_tensors<double>(model));
}

/// The mistake that the global normaliser avoids is a visible one with these token counts.
TEST(LockstepRanks, MeanOfRankMeansWouldDiffer) {
  const GptConfig model = model_with_dropout();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = skewed_batch(model);
  const auto expected = data_parallel_gradients<double>(model, parameters, batch, {2, 1}, kDropout);

  NamedTensors<double> mean_of_means = zero_tensors<double>(model);
  for (int rank = 0; rank < 2; ++rank) {
    const Interval rows = micro_batch_rows(batch.rows, 2, rank, 1, 0);
    const Batch own = slice_rows(batch, rows.begin, rows.size());
    loss_and_gradients<double>(model, parameters, own, {.valid_tokens = own.valid_tokens(), .dropout = kDropout}, mean_of_means);
  }
  for (auto& [name, values] : mean_of_means) {
    for (double& value : values) value /= 2.0;
  }

  EXPECT_GT(worst_deviation(mean_of_means, expected.gradients), 1e-2);
}

template <class Real>
class HalfPrecisionReduction : public testing::Test {
 protected:
  /// What every rank holds after the mean of `values`, one value a rank.
  static std::vector<Real> mean_of(std::vector<Real> values) {
    std::vector<std::span<Real>> ranks;
    for (Real& value : values) ranks.emplace_back(&value, 1);
    all_reduce_mean_f16<Real>(ranks);
    return values;
  }
};
using Precisions = testing::Types<float, double>;
TYPED_TEST_SUITE(HalfPrecisionReduction, Precisions);

TYPED_TEST(HalfPrecisionReduction, DoesNotOverflowNearTheLargestHalf) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const std::vector<TypeParam> values(static_cast<std::size_t>(ranks), TypeParam{65504});
    EXPECT_EQ(this->mean_of(values), values) << ranks << " ranks";
  }
  EXPECT_EQ(this->mean_of({65504, 65504, 65472, 65472}), std::vector<TypeParam>(4, TypeParam{65472}))
      << "65488 lies halfway between two fp16 numbers, of which 65472 is the even one";
}

TYPED_TEST(HalfPrecisionReduction, DoesNotFlushSmallValues) {
  const auto smallest_normal = static_cast<TypeParam>(0x1p-14);
  const auto smallest_subnormal = static_cast<TypeParam>(0x1p-24);
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const auto count = static_cast<std::size_t>(ranks);
    EXPECT_EQ(this->mean_of(std::vector<TypeParam>(count, smallest_normal)), std::vector<TypeParam>(count, smallest_normal));
    EXPECT_EQ(this->mean_of(std::vector<TypeParam>(count, smallest_subnormal)),
              std::vector<TypeParam>(count, smallest_subnormal));
  }
}

TYPED_TEST(HalfPrecisionReduction, KeepsSmallValuesBesideLargeOnesThatCancel) {
  EXPECT_EQ(this->mean_of({65504, 1, -65504, 3}), std::vector<TypeParam>(4, TypeParam{1}));
}

TYPED_TEST(HalfPrecisionReduction, RoundsWhatTravels) {
  // 2049 is no half: it travels as 2048 (ties to even).
  EXPECT_EQ(this->mean_of({2049, 2049}), std::vector<TypeParam>(2, TypeParam{2048}));
}

}  // namespace
}  // namespace tandem::reference
