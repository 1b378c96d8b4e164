// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cpu/attention_test_support.h"

namespace tandem::cpu {
namespace {

// One key, less than a tile, exactly one, several with a rest; head sizes below, at and between registers; rows that start new
// documents; masks whose first element is no multiple of four.
const std::vector<Setting> kSettings = {{0, 4, 2, 3, false, 0},   {1, 1, 1, 1, false, 0},     {2, 5, 3, 7, true, 0.3},
                                        {1, 32, 2, 16, false, 0}, {2, 67, 3, 24, true, 0},    {2, 131, 2, 20, true, 0.2},
                                        {3, 97, 2, 64, false, 0}, {1, 260, 1, 33, true, 0.5}, {1, 193, 5, 64, false, 0.1}};

class Attention : public testing::TestWithParam<const char*> {
 protected:
  template <class Real>
  void check();
};

template <class Real>
Outputs<Real> run_attention(Kernels& kernels, const Inputs& inputs, const std::vector<Real>& qkv, const std::vector<Real>& dout,
                            int total_heads = 0, int first_head = 0) {
  const Setting& s = inputs.setting;
  const std::int64_t tokens = s.rows * s.sequence, width = s.heads * s.head_size;
  const std::int64_t mask_heads = total_heads == 0 ? s.heads : total_heads;
  const AttentionShape shape{.rows = s.rows,
                             .sequence = s.sequence,
                             .heads = s.heads,
                             .head_size = s.head_size,
                             .document_starts = inputs.starts,
                             .dropout_sequence = inputs.model_sequence,
                             .total_heads = total_heads,
                             .first_head = first_head};
  const DropoutSpec dropout{.key = inputs.key,
                            .probability = s.dropout,
                            .row_ids = inputs.row_ids,
                            .row_elements = mask_heads * inputs.model_sequence * inputs.model_sequence};
  Guarded<Real> gqkv({tokens, 3 * width}, qkv), gdout({tokens, width}, dout);
  Guarded<Real> out({tokens, width}), logsumexp({s.rows, s.heads, s.sequence}), dqkv({tokens, 3 * width});
  kernels.attention_forward(shape, dropout, gqkv.view(), out.view(), logsumexp.view());
  kernels.attention_backward(shape, dropout, gdout.view(), gqkv.view(), out.view(), logsumexp.view(), dqkv.view());
  (void)logsumexp.values();
  return {out.values(), dqkv.values()};
}

/// The columns of qkv that belong to heads [first, first + count) of `heads`.
template <class Real>
std::vector<Real> qkv_of_heads(const std::vector<Real>& qkv, int heads, std::int64_t head_size, int first, int count) {
  std::vector<Real> result;
  const std::int64_t width = heads * head_size;
  for (auto part = qkv.begin(); part != qkv.end(); part += width) {
    result.insert(result.end(), part + first * head_size, part + (first + count) * head_size);
  }
  return result;
}

template <class Real>
void Attention::check() {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(fmt::format("{} rows of {}, {} heads of {}", s.rows, s.sequence, s.heads, s.head_size));
    const Inputs inputs = make_inputs(s);
    const std::int64_t tokens = s.rows * s.sequence, width = s.heads * s.head_size;
    const auto qkv = random_values<Real>(tokens * 3 * width, 1), dout = random_values<Real>(tokens * width, 2);
    const auto got =
        with_any_threads<Real>(GetParam(), "auto", [&](Kernels& kernels) { return run_attention(kernels, inputs, qkv, dout); });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const auto truth = reference_attention<double>(inputs, {qkv.begin(), qkv.end()}, {dout.begin(), dout.end()});
    // Two sums follow each other: over the head's channels and over the keys.
    expect_close<Real>(got, truth, reference_attention<Real>(inputs, qkv, dout), static_cast<double>(s.head_size + s.sequence));
  }
}

TEST_P(Attention, MatchesTheDefinitionInSingle) { check<float>(); }
TEST_P(Attention, MatchesTheDefinitionInDouble) { check<double>(); }

TEST_P(Attention, HeadsDealtToRanksDrawTheirMasksOfTheWhole) {
  const auto kernels = try_kernels(2, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const Inputs inputs = make_inputs({2, 37, 5, 12, true, 0.4});
  const std::int64_t tokens = 2 * 37, width = 5 * 12;
  const auto qkv = random_values<float>(tokens * 3 * width, 1), dout = random_values<float>(tokens * width, 2);
  const auto whole = run_attention<float>(*kernels, inputs, qkv, dout);

  for (const auto& [first, count] : {std::pair{0, 2}, {2, 2}, {4, 1}}) {
    Inputs part = inputs;
    part.setting.heads = count;
    const auto got = run_attention<float>(*kernels, part, qkv_of_heads(qkv, 5, 12, first, count),
                                          qkv_of_heads(dout, 5, 12, first, count), 5, first);
    EXPECT_TRUE(same_bits<float>(got, {qkv_of_heads(whole[0], 5, 12, first, count), qkv_of_heads(whole[1], 5, 12, first, count)}))
        << "heads from " << first;
  }
  EXPECT_THROW(run_attention<float>(*kernels, inputs, qkv, dout, 5, 1), ContractError);
}

TEST_P(Attention, LargeScoresDoNotOverflow) {
  const auto kernels = try_kernels(2, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const Inputs inputs = make_inputs({1, 70, 1, 16, false, 0});
  const auto qkv = random_values<float>(70 * 48, 1, 40.0), dout = random_values<float>(70 * 16, 2);

  const auto got = run_attention<float>(*kernels, inputs, qkv, dout);

  const auto truth = reference_attention<double>(inputs, {qkv.begin(), qkv.end()}, {dout.begin(), dout.end()});
  // Scores of size q.k / sqrt(d), up to 1e4 here, carry their rounding into the exponent: probabilities lose those digits.
  const double bound = 1e4 * static_cast<double>(std::numeric_limits<float>::epsilon()) * std::sqrt(16.0);
  EXPECT_TRUE(relative_error(got[0], truth[0]) <= bound);
}

TEST_P(Attention, NanInOneTokenStaysWithThoseThatSeeIt) {
  const auto kernels = try_kernels(2, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  Inputs inputs = make_inputs({1, 50, 1, 8, false, 0});
  for (std::int64_t t = 40; t < 50; ++t) inputs.starts[static_cast<std::size_t>(t)] = 40;
  auto qkv = random_values<float>(50 * 24, 1);
  qkv[37 * 24 + 8] = std::numeric_limits<float>::quiet_NaN();  // a key

  const auto out = run_attention<float>(*kernels, inputs, qkv, random_values<float>(50 * 8, 2))[0];

  for (std::int64_t t = 0; t < 50; ++t) EXPECT_EQ(std::isnan(out[static_cast<std::size_t>(t * 8)]), t >= 37 && t < 40) << t;
}

TEST_P(Attention, DecodingTokenByTokenGivesTheForwardPass) {
  const auto kernels = try_kernels(2, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const Setting s{2, 19, 3, 10, false, 0};
  const std::int64_t width = s.heads * s.head_size, capacity = 23;
  const auto qkv = random_values<double>(s.rows * s.sequence * 3 * width, 1);
  const auto whole =
      run_attention<double>(*kernels, make_inputs(s), qkv, random_values<double>(s.rows * s.sequence * width, 2))[0];

  Guarded<double> keys({s.rows, capacity, width}), values({s.rows, capacity, width});
  for (std::int64_t t = 0; t < s.sequence; ++t) {
    std::vector<double> token, expected;
    for (std::int64_t row = 0; row < s.rows; ++row) {
      const auto at = static_cast<std::ptrdiff_t>(row * s.sequence + t);
      token.insert(token.end(), qkv.begin() + at * 3 * width, qkv.begin() + (at + 1) * 3 * width);
      expected.insert(expected.end(), whole.begin() + at * width, whole.begin() + (at + 1) * width);
    }
    Guarded<double> in({s.rows, 3 * width}, token), out({s.rows, width});
    kernels->attention_decode(s.heads, s.head_size, t, in.view(), keys.view(), values.view(), out.view());
    expect_close<double>({out.values()}, {expected}, {}, static_cast<double>(s.head_size + s.sequence));
  }
}

TEST_P(Attention, RefusesDocumentsThatStartInTheFuture) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  Inputs inputs = make_inputs({1, 4, 1, 2, false, 0});
  inputs.starts[2] = 3;
  EXPECT_THROW(run_attention<float>(*kernels, inputs, random_values<float>(24, 1), random_values<float>(8, 2)), ContractError);
}

INSTANTIATE_TEST_SUITE_P(Sets, Attention, testing::ValuesIn(kInstructionSets),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tandem::cpu
