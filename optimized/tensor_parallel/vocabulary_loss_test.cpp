// SPDX-License-Identifier: Apache-2.0
#include "optimized/tensor_parallel/vocabulary_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "kernels/kernels.h"

namespace tandem {
namespace {

TEST(VocabularyLoss, PartsCoverTheVocabularyInOrderAndPaddingIsTheRest) {
  for (const std::int64_t vocabulary : {1, 2, 5, 256, 50257}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      const std::int64_t padded = padded_vocabulary(vocabulary, ranks);
      EXPECT_EQ(padded % ranks, 0);
      EXPECT_TRUE(padded >= vocabulary && padded < vocabulary + ranks) << padded;
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Interval part = vocabulary_part(vocabulary, ranks, rank);
        EXPECT_EQ(part.begin, next);
        EXPECT_LE(part.size(), padded / ranks);
        EXPECT_TRUE(part.size() == 0 || part.begin == rank * (padded / ranks));
        next = part.end;
      }
      EXPECT_EQ(next, vocabulary);
    }
  }
}

TEST(VocabularyLoss, PartsOfFiveOverFourRanksByHand) {
  EXPECT_EQ(padded_vocabulary(5, 4), 8);
  EXPECT_EQ(vocabulary_part(5, 4, 1), (Interval{2, 4}));
  EXPECT_EQ(vocabulary_part(5, 4, 2), (Interval{4, 5}));
  EXPECT_EQ(vocabulary_part(5, 4, 3), (Interval{5, 5}));
}

TEST(VocabularyLoss, MergesStatisticsByHand) {
  // Token 0: logits {log 1, log 2} and {log 5}; token 1 the other way round, with a third rank that holds nothing.
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> gathered = {std::log(2), 1.5, std::log(2), std::log(5), 1,   0,            // rank 0
                                  std::log(5), 1,   0,           std::log(2), 1.5, std::log(1),  // rank 1
                                  kNone,       0,   0,           kNone,       0,   0};
  std::vector<double> logsumexp(2), target(2);

  merge_statistics(view_of(gathered, {3, 2, 3}), view_of(logsumexp, {2}), view_of(target, {2}));

  EXPECT_NEAR(logsumexp[0], std::log(8), 1e-15);
  EXPECT_NEAR(logsumexp[1], std::log(8), 1e-15);
  EXPECT_EQ(target[0], std::log(2));
  EXPECT_EQ(target[1], 0);
  const std::vector<std::int32_t> both = {1, 0}, second = {kIgnoredTarget, 0};
  EXPECT_NEAR(loss_sum(view_of(logsumexp, {2}), view_of(target, {2}), both), std::log(4) + std::log(8), 1e-15);
  EXPECT_NEAR(loss_sum(view_of(logsumexp, {2}), view_of(target, {2}), second), std::log(8), 1e-15);
}

TEST(VocabularyLoss, FarApartPartsDoNotOverflowAndNanIsSeen) {
  std::vector<float> gathered = {3e38F, 1, 0, -3e38F, 2, 7, 1, 1, 0, std::numeric_limits<float>::quiet_NaN(), 1, 0};
  std::vector<float> logsumexp(1), target(1);
  merge_statistics(TensorView(gathered.data(), DType::f32, {2, 1, 3}), view_of(logsumexp, {1}), view_of(target, {1}));
  EXPECT_EQ(logsumexp[0], 3e38F);
  EXPECT_EQ(target[0], 7);
  merge_statistics(TensorView(gathered.data() + 6, DType::f32, {2, 1, 3}), view_of(logsumexp, {1}), view_of(target, {1}));
  EXPECT_TRUE(std::isnan(logsumexp[0]));
}

TEST(VocabularyLoss, NoTokensGiveNoLoss) {
  std::vector<float> none;
  merge_statistics(view_of(none, {2, 0, 3}), view_of(none, {0}), view_of(none, {0}));
  EXPECT_EQ(loss_sum(view_of(none, {0}), view_of(none, {0}), {}), 0);
}

/// The whole path: local logits with padding, statistics, merge, loss and gradient, against the loss of the whole logits.
template <class Real>
void check_against_whole(std::int64_t vocabulary, int ranks) {
  SCOPED_TRACE(::testing::Message() << vocabulary << " tokens over " << ranks);
  constexpr std::int64_t kTokens = 6;
  const std::int64_t local = padded_vocabulary(vocabulary, ranks) / ranks;
  CounterRng rng(5, "vocabulary");
  std::vector<Real> whole(static_cast<std::size_t>(kTokens * vocabulary));
  for (Real& value : whole) value = static_cast<Real>(4 * rng.next_normal());
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    targets.push_back(t == 2 ? kIgnoredTarget : static_cast<std::int32_t>(t * 7919 % vocabulary));
  }
  const auto kernels = make_cpu_kernels({.threads = 1});
  std::vector<std::vector<Real>> parts;
  std::vector<std::vector<std::int32_t>> part_targets;
  std::vector<Real> gathered(static_cast<std::size_t>(ranks * kTokens * 3));
  for (int rank = 0; rank < ranks; ++rank) {
    const Interval columns = vocabulary_part(vocabulary, ranks, rank);
    std::vector<Real> logits(static_cast<std::size_t>(kTokens * local), std::numeric_limits<Real>::quiet_NaN());
    std::vector<std::int32_t> here;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t c = columns.begin; c < columns.end; ++c) {
        logits[static_cast<std::size_t>(t * local + c - columns.begin)] = whole[static_cast<std::size_t>(t * vocabulary + c)];
      }
      const std::int32_t target = targets[static_cast<std::size_t>(t)];
      here.push_back(target >= columns.begin && target < columns.end ? target - static_cast<std::int32_t>(columns.begin) : -1);
    }
    const TensorView all = view_of(gathered, {ranks, kTokens, 3});
    kernels->cross_entropy_statistics(view_of(logits, {kTokens, local}), columns.size(), here, all.rows(rank, 1));
    parts.push_back(logits);
    part_targets.push_back(here);
  }
  std::vector<Real> logsumexp(kTokens), target_logit(kTokens);
  merge_statistics(view_of(gathered, {ranks, kTokens, 3}), view_of(logsumexp, {kTokens}), view_of(target_logit, {kTokens}));
  const double loss = loss_sum(view_of(logsumexp, {kTokens}), view_of(target_logit, {kTokens}), targets);
  std::vector<std::uint8_t> valid(kTokens, 1);
  valid[2] = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    kernels->cross_entropy_gradient(view_of(parts[r], {kTokens, local}), vocabulary_part(vocabulary, ranks, rank).size(),
                                    part_targets[r], valid, view_of(logsumexp, {kTokens}), 0.125);
  }

  std::vector<Real> gradient = whole;
  const double expected = kernels->cross_entropy_forward_backward(view_of(gradient, {kTokens, vocabulary}), targets, 0.125);
  const double eps = static_cast<double>(std::numeric_limits<Real>::epsilon());
  // logsumexp, up to 20 here, is kept in the precision of the tensors, and its rounding is a factor of the gradient.
  EXPECT_NEAR(loss, expected, 20 * kTokens * eps);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t c = 0; c < ranks * local; ++c) {
      const double got =
          static_cast<double>(parts[static_cast<std::size_t>(c / local)][static_cast<std::size_t>(t * local + c % local)]);
      const double want = c < vocabulary ? static_cast<double>(gradient[static_cast<std::size_t>(t * vocabulary + c)]) : 0.0;
      ASSERT_NEAR(got, want, 0.125 * 40 * eps) << "token " << t << ", column " << c;
    }
  }
}

TEST(VocabularyLoss, SplitOverRanksIsTheLossOfTheWholeVocabulary) {
  for (const auto& [vocabulary, ranks] : {std::pair<std::int64_t, int>{1, 2}, {5, 4}, {256, 2}, {257, 4}, {9, 1}}) {
    check_against_whole<float>(vocabulary, ranks);
    check_against_whole<double>(vocabulary, ranks);
  }
}

}  // namespace
}  // namespace tandem
