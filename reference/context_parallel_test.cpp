// SPDX-License-Identifier: Apache-2.0
#include "reference/context_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include <fmt/format.h>

#include "reference/attention.h"
#include "reference/parallel_test_support.h"

namespace tandem::reference {
namespace {

using Layout = std::tuple<int, std::int64_t>;  // ranks, tokens of a row
class ContextRanks : public testing::TestWithParam<Layout> {
 protected:
  ContextRanks() {
    pack_documents(batch_, {2, 6});
    batch_.row_ids = {3, 7, 1, 4};
  }

  [[nodiscard]] static ContextParallelLayout layout() { return {std::get<0>(GetParam())}; }
  GptConfig model_ = parallel_test_model(std::get<0>(GetParam()) != 3);
  NamedTensors<double> parameters_ = lively_parameters(model_, 1);
  Batch batch_ = ragged_batch(model_, std::get<1>(GetParam()), {std::get<1>(GetParam()), 1, 0, 3}, 6);
  Pass<double> pass_ = parallel_test_pass<double>(batch_);
};

TEST_P(ContextRanks, GiveTheGradientOfOneDevice) {
  const OneDeviceStep expected = one_device_step(model_, parameters_, batch_, pass_);

  const auto got = context_parallel_gradients(model_, parameters_, batch_, layout(), pass_);

  EXPECT_NEAR(got.loss, expected.loss, 1e-12 * expected.loss);
  EXPECT_LE(worst_deviation(got.gradients, expected.gradients), 1e-12);
}

TEST_P(ContextRanks, ExchangeWhatTheFormulaSays) {
  const auto step = context_parallel_local_gradients(model_, parameters_, batch_, layout(), pass_);

  EXPECT_EQ(step.exchanges, context_parallel_exchanges(model_, batch_.rows * batch_.sequence, layout()));
}

TEST_P(ContextRanks, RoundInFloatAsOneDeviceDoes) {
  const OneDeviceStep expected = one_device_step(model_, parameters_, batch_, pass_);
  const auto got = context_parallel_gradients<float>(model_, converted<float>(parameters_), batch_, layout(),
                                                     parallel_test_pass<float>(batch_));

  // fp32 epsilon 1.2e-7 over a few dozen operations in a row.
  for (const auto& [name, values] : got.gradients) EXPECT_LE(relative_l2(values, expected.gradients.at(name)), 2e-5) << name;
}

TEST_P(ContextRanks, HoldEveryTokenOnce) {
  const auto [ranks, tokens] = GetParam();
  std::vector<std::int64_t> held;
  for (int c = 0; c < ranks; ++c) {
    const ContextSlice slice = context_slice(batch_, ranks, c);
    EXPECT_TRUE(std::is_sorted(slice.positions.begin(), slice.positions.end()));
    held.insert(held.end(), slice.positions.begin(), slice.positions.end());
  }
  std::sort(held.begin(), held.end());
  std::vector<std::int64_t> all(static_cast<std::size_t>(tokens));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  EXPECT_EQ(held, all);
}

INSTANTIATE_TEST_SUITE_P(Layouts, ContextRanks, testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(11, 8, 3)),
                         [](const auto& instance) {
                           return fmt::format("ranks{}_tokens{}", std::get<0>(instance.param), std::get<1>(instance.param));
                         });

TEST(ContextParallel, GivesEachRankAnEarlyAndALateChunk) {
  const auto first = context_chunks(11, 2, 0);  // chunks of 3, 3, 3, 2
  const auto second = context_chunks(11, 2, 1);
  EXPECT_EQ(first[0], (Interval{0, 3}));
  EXPECT_EQ(first[1], (Interval{9, 11}));
  EXPECT_EQ(second[0], (Interval{3, 6}));
  EXPECT_EQ(second[1], (Interval{6, 9}));
}

/// What the zig-zag is for: pairs of query and key under the causal mask, the same for all ranks where 2C divides the row.
TEST(ContextParallel, GivesEachRankTheSameNumberOfPairs) {
  for (const int ranks : {1, 2, 3, 4}) {
    const std::int64_t tokens = 24;
    for (int c = 0; c < ranks; ++c) {
      std::int64_t pairs = 0;
      for (const Interval& chunk : context_chunks(tokens, ranks, c)) {
        for (std::int64_t t = chunk.begin; t < chunk.end; ++t) pairs += t + 1;
      }
      EXPECT_EQ(pairs, tokens * (tokens + 1) / 2 / ranks) << ranks << " ranks";
    }
  }
}

TEST(ContextParallel, MergesPartsIntoAttentionOverAllKeys) {
  Batch batch = make_batch(2, 7);
  pack_documents(batch, {3});
  const std::vector<double> qkv = random_values(2 * 7 * 18, 4);
  std::vector<double> whole(2 * 7 * 6), probabilities(2 * 2 * 7 * 7);
  attention_forward<double>({2, 6, {batch.row_ids, 7, 7}, batch.document_starts, {}}, qkv, whole, probabilities);

  std::vector<ContextSlice> slices = {context_slice(batch, 2, 0), context_slice(batch, 2, 1)};
  PerRank<double> of_ranks(2);
  for (std::size_t c = 0; c < 2; ++c) {
    for (std::int64_t row = 0; row < 2; ++row) {
      for (const std::int64_t t : slices[c].positions) {
        const auto begin = qkv.begin() + (row * 7 + t) * 18;
        of_ranks[c].insert(of_ranks[c].end(), begin, begin + 18);
      }
    }
  }
  std::int64_t sent = 0;
  const auto parts = ring_attention_forward<double>({2, 6, 7, slices, {}}, of_ranks, sent);

  for (std::size_t c = 0; c < 2; ++c) {
    const auto own = static_cast<std::int64_t>(slices[c].positions.size());
    for (std::int64_t i = 0; i < 2 * own * 6; ++i) {
      const std::int64_t row = i / (own * 6);
      const std::int64_t t = slices[c].positions[static_cast<std::size_t>(i / 6 % own)];
      EXPECT_NEAR(parts[c].out[static_cast<std::size_t>(i)], whole[static_cast<std::size_t>((row * 7 + t) * 6 + i % 6)], 1e-14);
    }
  }
  EXPECT_EQ(sent, 2 * 2 * 7 * 6) << "keys and values of two rows of seven tokens, one hop";
}

TEST(ContextParallel, GivesZerosForABatchWithoutRows) {
  const GptConfig model = parallel_test_model();
  const Batch none = slice_rows(parallel_test_batch(model), 0, 0);
  const auto got = context_parallel_gradients(model, lively_parameters(model, 1), none, {3}, {.valid_tokens = 14});

  EXPECT_EQ(got.gradients, zero_tensors<double>(model));
  EXPECT_EQ(got.loss, 0.0);
}

}  // namespace
}  // namespace tandem::reference
