// SPDX-License-Identifier: Apache-2.0
#include "reference/ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/dtype.h"
#include "core/error.h"
#include "core/io/safetensors.h"
#include "reference/attention.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

/// Every operator against recorded results of an outside program, in double and in float.
template <class Real>
class Pieces : public testing::Test {
 protected:
  static SafetensorsFile piece(const std::string& name) {
    return SafetensorsFile(own_golden_folder() / "pieces" / (name + ".safetensors"));
  }
  static std::vector<Real> input(const SafetensorsFile& file, std::string_view name) { return file.read_as<Real>(name); }
  static double error(const SafetensorsFile& file, std::string_view name, const std::vector<Real>& got) {
    return relative_l2(got, file.read_as<double>(name));
  }
  static double row_error(const SafetensorsFile& file, std::string_view name, const std::vector<Real>& got, std::int64_t row,
                          std::int64_t width) {
    const std::vector<double> expected = file.read_as<double>(name);
    const auto begin = row * width;
    return relative_l2(std::vector<Real>(got.begin() + begin, got.begin() + begin + width),
                       std::vector<double>(expected.begin() + begin, expected.begin() + begin + width));
  }
  /// Two programs that sum `length` products in different orders: each is off by about sqrt(length) roundings of the result's
  /// size, and 8 leaves room for the handful of operations around the sum and for the terms being larger than their sum.
  static double bound(std::int64_t length) {
    return 8.0 * unit_roundoff(dtype_of<Real>) * std::sqrt(static_cast<double>(length));
  }
};
using Precisions = testing::Types<double, float>;
TYPED_TEST_SUITE(Pieces, Precisions);

TYPED_TEST(Pieces, LayerNormMatches) {
  const SafetensorsFile file = this->piece("layernorm");
  const auto x = this->input(file, "x");
  const auto weight = this->input(file, "weight");
  const auto rows = static_cast<std::size_t>(file.entry("x").shape[0]);
  std::vector<TypeParam> y(x.size()), dx(x.size()), mean(rows), rstd(rows), dweight(weight.size()), dbias(weight.size());

  layer_norm_forward<TypeParam>(x, weight, this->input(file, "bias"), 1e-5, y, {mean, rstd});
  layer_norm_backward<TypeParam>(x, weight, {mean, rstd}, this->input(file, "dy"), dx, dweight, dbias);

  // x - mean cancels: a rounding of the size of the mean counts |mean| / stddev times. In row 0 that is large.
  const auto hidden = static_cast<std::int64_t>(weight.size());
  const double bound = this->bound(hidden);
  double worst_cancellation = 1.0;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows); ++row) {
    const auto r = static_cast<std::size_t>(row);
    const double cancellation = std::max(1.0, std::abs(static_cast<double>(mean[r] * rstd[r])));
    worst_cancellation = std::max(worst_cancellation, cancellation);
    EXPECT_LE(this->row_error(file, "y", y, row, hidden), cancellation * bound) << "row " << row;
    EXPECT_LE(this->row_error(file, "dx", dx, row, hidden), cancellation * bound) << "row " << row;
  }
  EXPECT_LE(this->error(file, "mean", mean), bound);
  EXPECT_LE(this->error(file, "rstd", rstd), bound);
  EXPECT_LE(this->error(file, "dweight", dweight), worst_cancellation * bound);
  EXPECT_LE(this->error(file, "dbias", dbias), bound);
}

TYPED_TEST(Pieces, LinearMatches) {
  const SafetensorsFile file = this->piece("linear");
  const auto x = this->input(file, "x");
  const auto weight = this->input(file, "weight");
  const auto dy = this->input(file, "dy");
  const Shape& shape = file.entry("weight").shape;
  const LinearSize size{file.entry("x").shape[0], shape[0], shape[1]};
  std::vector<TypeParam> y(dy.size()), dx(x.size()), dweight(weight.size()), dbias(static_cast<std::size_t>(size.out));

  linear_forward<TypeParam>(size, x, weight, this->input(file, "bias"), y);
  linear_backward<TypeParam>(size, x, weight, dy, dx, dweight, dbias);

  EXPECT_LE(this->error(file, "y", y), this->bound(size.in));
  EXPECT_LE(this->error(file, "dx", dx), this->bound(size.out));
  EXPECT_LE(this->error(file, "dweight", dweight), this->bound(size.rows));
  EXPECT_LE(this->error(file, "dbias", dbias), this->bound(size.rows));
}

TYPED_TEST(Pieces, GeluMatches) {
  const SafetensorsFile file = this->piece("gelu_tanh");
  const auto x = this->input(file, "x");
  std::vector<TypeParam> y(x.size()), dx(x.size());

  gelu_forward<TypeParam>(x, y);
  gelu_backward<TypeParam>(x, this->input(file, "dy"), dx);

  EXPECT_LE(this->error(file, "y", y), this->bound(1));
  EXPECT_LE(this->error(file, "dx", dx), this->bound(1));
}

TYPED_TEST(Pieces, AttentionMatches) {
  const SafetensorsFile file = this->piece("attention");
  const auto qkv = this->input(file, "qkv");
  const Shape& shape = file.entry("out").shape;
  const int heads = std::stoi(file.metadata().find("n_head")->second);
  std::vector<std::int64_t> row_ids(static_cast<std::size_t>(shape[0]));
  std::iota(row_ids.begin(), row_ids.end(), std::int64_t{0});
  const std::vector<std::int32_t> starts(static_cast<std::size_t>(shape[0] * shape[1]), 0);
  const AttentionInput input{heads, shape[2], {row_ids, shape[1], shape[1]}, starts, {}};
  std::vector<TypeParam> out(qkv.size() / 3), dqkv(qkv.size());
  std::vector<TypeParam> probabilities(static_cast<std::size_t>(shape[0] * heads * shape[1] * shape[1]));

  attention_forward<TypeParam>(input, qkv, out, probabilities);
  attention_backward<TypeParam>(input, qkv, probabilities, this->input(file, "dout"), dqkv);

  // Scores, softmax and weighted sum one after the other: sums over head size, keys and keys.
  const double bound = this->bound(shape[2] / heads + 2 * shape[1]);
  EXPECT_LE(this->error(file, "out", out), bound);
  EXPECT_LE(this->error(file, "probs", probabilities), bound);
  EXPECT_LE(this->error(file, "dqkv", dqkv), bound);
}

TYPED_TEST(Pieces, CrossEntropyMatches) {
  const SafetensorsFile file = this->piece("cross_entropy");
  const auto logits = this->input(file, "logits");
  const auto targets = file.read_as<std::int32_t>("targets");
  const auto valid = static_cast<std::int64_t>(targets.size()) - std::count(targets.begin(), targets.end(), kIgnoredTarget);
  std::vector<TypeParam> log_sum_exp(targets.size()), dlogits(logits.size());

  const double loss = cross_entropy_forward<TypeParam>(logits, targets, valid, log_sum_exp);
  cross_entropy_backward<TypeParam>(logits, targets, valid, log_sum_exp, dlogits);

  // Two rows are shifted by 80, and a probability is exp of a difference of such numbers: 80 times the roundoff.
  const double bound = 80.0 * this->bound(1);
  EXPECT_LE(std::abs(loss / file.read_as<double>("loss")[0] - 1.0), bound);
  EXPECT_LE(this->error(file, "logsumexp", log_sum_exp), this->bound(1));
  EXPECT_LE(this->error(file, "dlogits", dlogits), bound);
  EXPECT_LT(valid, static_cast<std::int64_t>(targets.size())) << "the file should have ignored targets";
}

TEST(CrossEntropy, WithoutValidTokensIsZeroAndHasNoGradient) {
  const std::vector<double> logits = {1.0, 2.0, 3.0, 4.0};
  const std::vector<std::int32_t> targets = {kIgnoredTarget, kIgnoredTarget};
  std::vector<double> log_sum_exp(2), dlogits(4, 7.0);

  const double loss = cross_entropy_forward<double>(logits, targets, 0, log_sum_exp);
  cross_entropy_backward<double>(logits, targets, 0, log_sum_exp, dlogits);

  EXPECT_EQ(loss, 0.0);
  EXPECT_EQ(dlogits, std::vector<double>(4, 0.0));
}

TEST(Dropout, KeepsWhatTheKeysWordsSayAtGlobalIndices) {
  const Dropout dropout{0.25, {77, 3, 2, DropoutSite::mlp_residual}};
  const std::vector<std::int64_t> row_ids = {9, 4};
  const RowPlacement rows{row_ids, 3, 5};
  const std::vector<double> ones(2 * 3 * 4, 1.0);
  std::vector<double> y(ones.size());

  apply_dropout<double>(dropout, rows, ones, y);

  for (std::size_t i = 0; i < y.size(); ++i) {
    const auto row_id = static_cast<std::uint64_t>(row_ids[i / 12]);
    const std::uint64_t element_index = (row_id * 5 + i % 12 / 4) * 4 + i % 4;
    const bool kept = dropout.key.word(element_index) >= 0x40000000U;
    EXPECT_EQ(y[i], kept ? 1.0 / 0.75 : 0.0) << "element " << i;
  }
}

TEST(Dropout, KeepsTheMeanAndDropsItsShare) {
  const Dropout dropout{0.3, {5, 0, 0, DropoutSite::embedding}};
  const std::int64_t count = 100000;
  double sum = 0.0;
  std::int64_t dropped = 0;

  for (std::int64_t i = 0; i < count; ++i) {
    const double factor = dropout_factor<double>(dropout, static_cast<std::uint64_t>(i));
    sum += factor;
    dropped += factor == 0.0 ? 1 : 0;
  }

  // Five standard deviations of a binomial share: 5 sqrt(0.3 * 0.7 / 1e5) = 0.0072.
  EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(count), 0.3, 0.0072);
  EXPECT_NEAR(sum / static_cast<double>(count), 1.0, 0.0072 / 0.7);
}

TEST(Attention, DoesNotSeeOtherDocuments) {
  const std::int64_t tokens = 6;
  const std::vector<std::int64_t> row_ids = {0};
  const std::vector<std::int32_t> starts = {0, 0, 2, 2, 2, 5};
  const AttentionInput input{2, 4, {row_ids, tokens, tokens}, starts, {}};
  std::vector<double> qkv = random_values(static_cast<std::size_t>(tokens * 12), 1);
  std::vector<double> before(static_cast<std::size_t>(tokens * 4)), after(before.size()), probabilities(2 * 36);
  attention_forward<double>(input, qkv, before, probabilities);

  for (std::size_t i = 0; i < 24; ++i) qkv[i] += 1.0;  // tokens 0 and 1
  attention_forward<double>(input, qkv, after, probabilities);

  EXPECT_NE(std::vector<double>(before.begin(), before.begin() + 8), std::vector<double>(after.begin(), after.begin() + 8));
  EXPECT_EQ(std::vector<double>(before.begin() + 8, before.end()), std::vector<double>(after.begin() + 8, after.end()));
}

TEST(Attention, DropsProbabilitiesByTheGlobalIndexOfQueryAndKey) {
  const std::int64_t tokens = 4, sequence = 7, size = 3;
  const int heads = 2;
  const std::vector<std::int64_t> row_ids = {9, 4};
  const std::vector<std::int32_t> starts(8, 0);
  const Dropout dropout{0.5, {77, 3, 2, DropoutSite::attention_probability}};
  const AttentionInput input{heads, heads * size, {row_ids, tokens, sequence}, starts, dropout};
  const std::vector<double> qkv = random_values(2 * 4 * 18, 1);
  std::vector<double> out(2 * 4 * 6), probabilities(2 * 2 * 16), expected(out.size());

  attention_forward<double>(input, qkv, out, probabilities);

  for (std::size_t i = 0; i < probabilities.size(); ++i) {
    const std::size_t row = i / 32, head = i / 16 % 2, query = i / 4 % 4, key = i % 4;
    const std::uint64_t element_index = ((static_cast<std::uint64_t>(row_ids[row]) * 2 + head) * 7 + query) * 7 + key;
    if (dropout.key.word(element_index) < 0x80000000U) continue;
    for (std::size_t c = 0; c < 3; ++c) {
      expected[(row * 4 + query) * 6 + head * 3 + c] += 2.0 * probabilities[i] * qkv[(row * 4 + key) * 18 + 12 + head * 3 + c];
    }
  }
  EXPECT_LE(relative_l2(out, expected), 1e-15);
}

TEST(Operators, RefuseSpansOfAnotherSize) {
  std::vector<double> x(6), weight(6), bias(2), y(4);
  try {
    linear_forward<double>({2, 3, 2}, x, weight, bias, std::span(y).first(3));
    FAIL() << "a short output was accepted";
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find("y has 3 elements, expected 4"), std::string::npos) << error.what();
  }
}

TEST(Embedding, RefusesPositionsOutsideTheTable) {
  const std::vector<double> wte(4), wpe(4);
  std::vector<double> out(2);
  const std::vector<std::int32_t> ids = {1}, positions = {2};
  EXPECT_THROW(embedding_forward<double>(wte, wpe, ids, positions, out), ContractError);
}

}  // namespace
}  // namespace tandem::reference
