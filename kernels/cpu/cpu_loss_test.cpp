// SPDX-License-Identifier: Apache-2.0
// The loss of a vocabulary dealt to ranks, and dropout of tokens dealt to ranks.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/batch.h"
#include "kernels/cpu/test_support.h"
#include "reference/ops.h"

namespace tandem::cpu {
namespace {

class Loss : public testing::TestWithParam<const char*> {};

/// Logits [tokens, vocabulary] whose columns are dealt to parts of equal width, the last of them padded.
template <class Real>
struct Split {
  std::int64_t tokens, vocabulary, width;
  int parts;
  std::vector<Real> whole;
  std::vector<std::int32_t> targets;
  Real padding;

  [[nodiscard]] Interval columns(int part) const {
    return {std::min(vocabulary, part * width), std::min(vocabulary, (part + 1) * width)};
  }
  [[nodiscard]] std::vector<Real> logits(int part) const {
    std::vector<Real> result(static_cast<std::size_t>(tokens * width), padding);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto row = whole.begin() + t * vocabulary;
      std::copy(row + columns(part).begin, row + columns(part).end, result.begin() + t * width);
    }
    return result;
  }
  [[nodiscard]] std::vector<std::int32_t> local_targets(int part) const {
    const Interval here = columns(part);
    std::vector<std::int32_t> result;
    for (const std::int32_t target : targets) {
      result.push_back(target >= here.begin && target < here.end ? target - static_cast<std::int32_t>(here.begin) : -1);
    }
    return result;
  }
  [[nodiscard]] std::vector<std::uint8_t> valid() const {
    std::vector<std::uint8_t> result;
    for (const std::int32_t target : targets) result.push_back(target == kIgnoredTarget ? 0 : 1);
    return result;
  }
};

template <class Real>
Split<Real> make_split(std::int64_t tokens, std::int64_t vocabulary, int parts, Real padding) {
  Split<Real> split{tokens, vocabulary, (vocabulary + parts - 1) / parts, parts, {}, {}, padding};
  split.whole = random_values<Real>(tokens * vocabulary, 1, 4.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    split.targets.push_back(t % 3 == 1 ? kIgnoredTarget : static_cast<std::int32_t>((t * 7919) % vocabulary));
  }
  return split;
}

/// The statistics of every part, then, with the logsumexp that they have together, every part's gradient.
template <class Real>
Outputs<Real> run_split(Kernels& kernels, const Split<Real>& split, double scale) {
  std::vector<double> sums(split.targets.size(), 0.0), target_logits(sums.size(), 0.0);
  for (int part = 0; part < split.parts; ++part) {
    Guarded<Real> logits({split.tokens, split.width}, split.logits(part)), statistics({split.tokens, 3});
    kernels.cross_entropy_statistics(logits.view(), split.columns(part).size(), split.local_targets(part), statistics.view());
    const std::vector<Real> values = statistics.values();
    for (std::size_t t = 0; t < sums.size(); ++t) {
      const double largest = static_cast<double>(values[3 * t]), sum = static_cast<double>(values[3 * t + 1]);
      EXPECT_TRUE(split.columns(part).size() > 0 || (std::isinf(largest) && largest < 0 && sum == 0));
      if (sum > 0) sums[t] += sum * std::exp(largest);
      target_logits[t] += static_cast<double>(values[3 * t + 2]);
    }
  }
  std::vector<Real> logsumexp;
  double loss = 0;
  for (std::size_t t = 0; t < sums.size(); ++t) {
    logsumexp.push_back(static_cast<Real>(std::log(sums[t])));
    if (split.targets[t] != kIgnoredTarget) loss += std::log(sums[t]) - target_logits[t];
  }
  Outputs<Real> outputs = {{static_cast<Real>(loss)}};
  for (int part = 0; part < split.parts; ++part) {
    Guarded<Real> logits({split.tokens, split.width}, split.logits(part)), kept({split.tokens}, logsumexp);
    kernels.cross_entropy_gradient(logits.view(), split.columns(part).size(), split.local_targets(part), split.valid(),
                                   kept.view(), scale);
    outputs.push_back(logits.values());
  }
  return outputs;
}

template <class Real>
void check_split(const char* set, std::int64_t tokens, std::int64_t vocabulary, int parts, Real padding) {
  SCOPED_TRACE(fmt::format("{} x {} in {}, padding {}", tokens, vocabulary, parts, padding));
  constexpr std::int64_t kValid = 1000;
  const Split<Real> split = make_split<Real>(tokens, vocabulary, parts, padding);
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) { return run_split(kernels, split, 1.0 / kValid); });
  if (got.empty()) GTEST_SKIP() << "not available here";

  std::vector<double> gradient(split.whole.size()), log_sum_exp(split.targets.size());
  const std::vector<double> logits(split.whole.begin(), split.whole.end());
  const double loss = reference::cross_entropy_forward<double>(logits, split.targets, kValid, log_sum_exp) * kValid;
  reference::cross_entropy_backward<double>(logits, split.targets, kValid, log_sum_exp, gradient);
  Split<double> truth{tokens, vocabulary, split.width, parts, gradient, split.targets, 0.0};
  Outputs<double> expected = {{loss}};
  for (int part = 0; part < parts; ++part) expected.push_back(truth.logits(part));
  // Roundings behind an element: the sum over a part's columns, whose pieces of 2048 are added up in double, and those of
  // logsumexp and of the subtraction, whose sizes of 20 or so they carry into the exponent.
  expect_close<Real>(got, expected, {}, static_cast<double>(100 + std::min<std::int64_t>(split.width, 2048)));
  for (int part = 0; part < parts; ++part) {
    for (std::int64_t i = 0; i < tokens * split.width; ++i) {
      if (i % split.width >= split.columns(part).size()) {
        ASSERT_EQ(got[static_cast<std::size_t>(part) + 1][static_cast<std::size_t>(i)], Real(0)) << "padding";
      }
    }
  }
}
TEST_P(Loss, OfColumnsDealtToRanksIsTheDefinitionWhateverThePaddingHolds) {
  struct Case {
    std::int64_t tokens, vocabulary;
    int parts;
  };
  for (const auto& [tokens, vocabulary, parts] : {Case{0, 5, 2}, {1, 1, 1}, {7, 3, 2}, {4, 5, 4}, {13, 257, 2}, {5, 50257, 4}}) {
    for (const double padding : {std::numeric_limits<double>::quiet_NaN(), 1e30}) {
      check_split<float>(GetParam(), tokens, vocabulary, parts, static_cast<float>(padding));
      check_split<double>(GetParam(), tokens, vocabulary, parts, padding);
    }
  }
}

TEST_P(Loss, RefusesTargetsInThePadding) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  std::vector<float> logits(8), statistics(6), logsumexp(2);
  const std::vector<std::int32_t> targets = {-1, 3};
  const std::vector<std::uint8_t> valid = {1, 1};
  EXPECT_THROW(kernels->cross_entropy_statistics(view_of(logits, {2, 4}), 3, targets, view_of(statistics, {2, 3})),
               ContractError);
  EXPECT_THROW(kernels->cross_entropy_gradient(view_of(logits, {2, 4}), 3, targets, valid, view_of(logsumexp, {2}), 1),
               ContractError);
}

/// A slice of tokens, as sequence parallelism deals them, under global token ids against the rows that they come from.
template <class Real>
void check_token_dropout(const char* set, std::int64_t hidden) {
  SCOPED_TRACE(fmt::format("hidden {}", hidden));
  constexpr std::int64_t kRows = 3, kSequence = 21, kTokens = kRows * kSequence, kFirst = 5, kCount = 40;
  const std::vector<std::int64_t> row_ids = {9, 2, 3};
  std::vector<std::int64_t> token_ids;
  for (std::int64_t t = kFirst; t < kFirst + kCount; ++t) {
    token_ids.push_back(row_ids[static_cast<std::size_t>(t / kSequence)] * kSequence + t % kSequence);
  }
  const DropoutKey key{.seed = 5, .step = 2, .layer = 3, .site = DropoutSite::attention_residual};
  const DropoutSpec by_row{key, 0.3, row_ids, kSequence * hidden}, by_token{key, 0.3, token_ids, hidden};
  const auto x = random_values<Real>(kTokens * hidden, 1), residual = random_values<Real>(kTokens * hidden, 2);
  const auto slice = [&](const std::vector<Real>& values) {
    return std::vector<Real>(values.begin() + kFirst * hidden, values.begin() + (kFirst + kCount) * hidden);
  };
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gx({kTokens, hidden}, x), whole({kTokens, hidden}), gr({kTokens, hidden}, residual), sum({kTokens, hidden});
    Guarded<Real> px({kCount, hidden}, slice(x)), part({kCount, hidden}), pr({kCount, hidden}, slice(residual)),
        part_sum({kCount, hidden});
    kernels.dropout_residual_forward(by_row, gx.view(), {}, whole.view());
    kernels.dropout_residual_forward(by_token, px.view(), {}, part.view());
    kernels.dropout_residual_forward(by_row, gx.view(), gr.view(), sum.view());
    kernels.dropout_residual_forward(by_token, px.view(), pr.view(), part_sum.view());
    kernels.dropout_backward(by_token, px.view(), px.view());
    return {slice(whole.values()), part.values(), px.values(), slice(sum.values()), part_sum.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  EXPECT_TRUE(got[0] == got[1] && got[0] == got[2]);
  EXPECT_GT(std::count(got[0].begin(), got[0].end(), Real(0)), 0);
  // x / (1 - p) + residual may be one fused multiply-add.
  expect_close<Real>({got[4]}, {{got[3].begin(), got[3].end()}}, {}, 1);
}
TEST_P(Loss, DropoutByTokenIsDropoutByRow) {
  for (const std::int64_t hidden : {1, 3, 64, 97, 130, 768, 8195}) {
    check_token_dropout<float>(GetParam(), hidden);
    check_token_dropout<double>(GetParam(), hidden);
  }
}

TEST_P(Loss, DropoutOfShortRowsIsKeyedByIdWhetherOrNotTheyFollowEachOther) {
  const auto kernels = try_kernels(2, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  constexpr std::int64_t kWidth = 70;
  const std::vector<std::int64_t> ids = {4, 5, 6, 8, 10, 11, 3, 4};
  const auto rows = static_cast<std::int64_t>(ids.size());
  const DropoutKey key{.seed = 6, .step = 1, .layer = 1, .site = DropoutSite::mlp_residual};
  for (const std::int64_t row_elements : {kWidth, kWidth + 3}) {
    std::vector<float> ones(static_cast<std::size_t>(rows * kWidth), 1.0F), out(ones.size());
    kernels->dropout_backward({key, 0.5, ids, row_elements}, view_of(ones, {rows, kWidth}), view_of(out, {rows, kWidth}));
    for (std::int64_t i = 0; i < rows * kWidth; ++i) {
      const std::int64_t element = ids[static_cast<std::size_t>(i / kWidth)] * row_elements + i % kWidth;
      const bool kept = key.word(static_cast<std::uint64_t>(element)) >= dropout_threshold(0.5);
      ASSERT_EQ(out[static_cast<std::size_t>(i)], kept ? 2.0F : 0.0F) << "element " << i << " of rows of " << row_elements;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Loss, testing::ValuesIn(kInstructionSets),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tandem::cpu
