// SPDX-License-Identifier: Apache-2.0
#include "reference/compression.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "core/io/safetensors.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();

using Codec = std::function<Compressed<float>(std::span<const float>, std::span<const float>)>;

std::vector<std::pair<std::string, Codec>> codecs() {
  using In = std::span<const float>;
  return {{"int8", [](In g, In r) { return quantize_blocks(g, r, 8, 64); }},
          {"int4", [](In g, In r) { return quantize_blocks(g, r, 4, 31); }},
          {"top_k", [](In g, In r) { return top_k(g, r, 7); }},
          {"random_k",
           [](In g, In r) {
             return random_k(g, r, 7, {1, 2, 3});
           }},
          {"sign", [](In g, In r) { return sign_blocks(g, r, 48); }}};
}

/// The rounding of the subtraction, where the codec does not make it exact.
float loss_allowed(const std::string& codec, float residual) { return codec == "sign" ? 0x1p-24F * std::abs(residual) : 0.0F; }

/// Fails unless decompressed + residual = gradient + old residual, element by element, in exact arithmetic but for
/// loss_allowed().
void expect_conserved(const std::string& codec, const std::vector<float>& gradient, const std::vector<float>& old,
                      const Compressed<float>& result) {
  ASSERT_TRUE(result.finite) << codec;
  ASSERT_EQ(result.decompressed.size(), gradient.size()) << codec;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float c = gradient[i] + (old.empty() ? 0.0F : old[i]);
    const double lost = static_cast<double>(result.decompressed[i]) + static_cast<double>(result.residual[i]) - c;
    EXPECT_LE(std::abs(lost), loss_allowed(codec, result.residual[i])) << codec << " element " << i;
  }
}

SafetensorsFile piece(const std::string& name) { return SafetensorsFile(golden_folder("pieces") / (name + ".safetensors")); }

class CompressionPieces : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(golden_folder("pieces"))) {
      GTEST_SKIP() << "no golden pieces at " << golden_folder("pieces").string();
    }
  }
};

template <class T>
std::vector<T> row(const std::vector<T>& values, std::int64_t index, std::int64_t width) {
  return {values.begin() + index * width, values.begin() + (index + 1) * width};
}

TEST_F(CompressionPieces, Int8WithErrorFeedbackFollowsTheRecordedTrace) {
  const SafetensorsFile file = piece("int8_error_feedback");
  const std::int64_t steps = std::stoll(file.metadata().at("steps")), n = std::stoll(file.metadata().at("n"));
  const std::int64_t block = std::stoll(file.metadata().at("block"));
  const auto gradients = file.read_as<float>("grad"), scales = file.read_as<float>("scale");
  const auto residuals = file.read_as<float>("residual"), decompressed = file.read_as<float>("dequantized");
  const auto codes = file.read_as<std::int32_t>("q");
  const std::int64_t blocks = (n + block - 1) / block;
  ASSERT_GE(steps, 2);
  std::vector<float> residual(static_cast<std::size_t>(n));

  for (std::int64_t step = 0; step < steps; ++step) {
    const Compressed<float> got = quantize_blocks<float>(row(gradients, step, n), residual, 8, block);

    ASSERT_TRUE(got.finite);
    EXPECT_EQ(got.codes, row(codes, step, n)) << "step " << step;
    ASSERT_EQ(static_cast<std::int64_t>(got.values.size()), blocks);
    for (std::int64_t i = 0; i < n; ++i) {
      const float largest = 127.0F * scales[static_cast<std::size_t>(step * blocks + i / block)];
      const auto at = static_cast<std::size_t>(step * n + i);
      EXPECT_LE(std::abs(got.residual[static_cast<std::size_t>(i)] - residuals[at]), 2e-7F * largest) << step << " " << i;
      EXPECT_LE(std::abs(got.decompressed[static_cast<std::size_t>(i)] - decompressed[at]), 2e-7F * largest) << step << " " << i;
    }
    residual = got.residual;
  }
}

TEST_F(CompressionPieces, TopKWithErrorFeedbackFollowsTheRecordedTraceExactly) {
  const SafetensorsFile file = piece("topk_error_feedback");
  const std::int64_t steps = std::stoll(file.metadata().at("steps")), n = std::stoll(file.metadata().at("n"));
  const std::int64_t k = std::stoll(file.metadata().at("k"));
  const auto gradients = file.read_as<float>("grad"), values = file.read_as<float>("values");
  const auto residuals = file.read_as<float>("residual");
  const auto indices = file.read_as<std::int32_t>("indices");
  ASSERT_GE(steps, 2);
  std::vector<float> residual(static_cast<std::size_t>(n));

  for (std::int64_t step = 0; step < steps; ++step) {
    const Compressed<float> got = top_k<float>(row(gradients, step, n), residual, k);

    EXPECT_EQ(got.indices, row(indices, step, k)) << "step " << step;
    EXPECT_EQ(got.values, row(values, step, k)) << "step " << step;
    EXPECT_EQ(got.residual, row(residuals, step, n)) << "step " << step;
    residual = got.residual;
  }
}

TEST(Compression, LosesNothingOverSteps) {
  for (const auto& [name, codec] : codecs()) {
    constexpr std::size_t kCount = 333;
    std::vector<float> residual;
    for (std::uint64_t step = 0; step < 6; ++step) {
      auto gradient = random_values<float>(kCount, 17 + step, 0.1 + static_cast<double>(step));
      for (std::size_t i = 64; i < 128; ++i) gradient[i] *= 1e-30F;
      const Compressed<float> result = codec(gradient, residual);
      expect_conserved(name, gradient, residual, result);
      EXPECT_NE(result.residual, std::vector<float>(kCount)) << name << " lost nothing: nothing was tested";
      residual = result.residual;
    }
  }
}

TEST(Compression, ConservesExtremeValues) {
  const std::vector<float> gradient = {kDenormal,
                                       -kDenormal,
                                       190 * kDenormal,
                                       0.0F,
                                       -0.0F,
                                       100 * kDenormal,
                                       1e-38F,
                                       -1e-37F,
                                       1e30F,
                                       -3e37F,
                                       std::nextafter(1e30F, 0.0F),
                                       7.0F,
                                       -0.5F,
                                       0.25F,
                                       1e-45F};
  for (const auto& [name, codec] : codecs()) {
    for (const std::size_t count : {0UL, 1UL, 3UL, 6UL, 15UL}) {
      const std::vector<float> head(gradient.begin(), gradient.begin() + static_cast<std::ptrdiff_t>(count));
      expect_conserved(name, head, {}, codec(head, {}));
    }
  }
}

TEST(Compression, FlagsWhatIsNotFiniteAndKeepsTheOldResidual) {
  for (const auto& [name, codec] : codecs()) {
    for (const float bad : {kInfinity, -kInfinity, kNan}) {
      auto gradient = random_values<float>(200, 3);
      const auto residual = random_values<float>(200, 4);
      gradient[171] = bad;
      const Compressed<float> result = codec(gradient, residual);
      EXPECT_FALSE(result.finite) << name;
      EXPECT_EQ(result.residual, residual) << name;
      EXPECT_TRUE(result.decompressed.empty() && result.values.empty() && result.codes.empty() && result.indices.empty()) << name;
    }
  }
}

TEST(Compression, FlagsASumThatOverflows) {
  const std::vector<float> large = {3e38F};
  EXPECT_FALSE(sign_blocks<float>(large, large, 1).finite);
  EXPECT_FALSE(top_k<float>(large, large, 1).finite);
}

TEST(QuantizeBlocks, RoundsHalfToEven) {
  const std::vector<float> gradient = {127.0F, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 126.5F};
  const Compressed<float> result = quantize_blocks<float>(gradient, {}, 8, 8);
  EXPECT_EQ(result.codes, (std::vector<std::int32_t>{127, 0, 2, 2, 0, -2, -2, 126}));
  EXPECT_EQ(result.values, std::vector<float>{1.0F});
}

TEST(QuantizeBlocks, FlagsABlockThatWouldDecodeToInfinity) {
  const std::vector<float> gradient = {std::numeric_limits<float>::max()};
  EXPECT_FALSE(quantize_blocks<float>(gradient, {}, 8, 4).finite) << "127 (max / 127) rounds up";
  EXPECT_TRUE(quantize_blocks<float>(gradient, {}, 4, 4).finite) << "max / 7 is exact";
}

TEST(QuantizeBlocks, ErrorIsAtMostHalfAQuantum) {
  for (const int bits : {8, 4}) {
    const auto gradient = random_values<double>(1000, 5);
    const Compressed<double> result = quantize_blocks<double>(gradient, {}, bits, 37);
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      EXPECT_LE(std::abs(result.residual[i]), 0.5 * result.values[i / 37] * (1 + 1e-12)) << bits << " bits, element " << i;
    }
  }
}

TEST(TopK, PrefersTheSmallerIndexOfEqualMagnitudes) {
  const std::vector<float> gradient = {1.0F, -2.0F, 2.0F, 1.0F, -2.0F, 0.0F};
  EXPECT_EQ(top_k<float>(gradient, {}, 2).indices, (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(top_k<float>(gradient, {}, 4).indices, (std::vector<std::int32_t>{0, 1, 2, 4}));
  EXPECT_EQ(top_k<float>(gradient, {}, 9).indices.size(), 6U) << "k is cut to the number of elements";
}

TEST(TopK, RoundTripsEverythingWhenKIsAll) {
  for (const std::size_t count : {std::size_t{32767}, std::size_t{32768}, std::size_t{65537}}) {
    const auto gradient = random_values<float>(count, 8);
    const Compressed<float> result = top_k<float>(gradient, {}, static_cast<std::int64_t>(count));
    EXPECT_EQ(result.decompressed, gradient);
    EXPECT_EQ(result.indices.back(), static_cast<std::int32_t>(count) - 1);
  }
}

TEST(RandomIndices, AreDistinctAscendingAndChangeWithEveryPartOfTheKey) {
  const auto base = random_indices({1, 2, 3}, 50, 1000);
  ASSERT_EQ(base.size(), 50U);
  for (std::size_t i = 1; i < base.size(); ++i) EXPECT_LT(base[i - 1], base[i]);
  EXPECT_EQ(random_indices({1, 2, 3}, 50, 1000), base);
  for (const RandomChoice& other : {RandomChoice{2, 2, 3}, RandomChoice{1, 3, 3}, RandomChoice{1, 2, 4}}) {
    EXPECT_NE(random_indices(other, 50, 1000), base);
  }
}

TEST(RandomIndices, ChooseEveryElementEquallyOften) {
  constexpr int kTrials = 20000, kCount = 10, kChosen = 3;
  std::vector<int> chosen(kCount);
  for (int step = 0; step < kTrials; ++step) {
    for (const std::int32_t index : random_indices({7, step, 0}, kChosen, kCount)) ++chosen[static_cast<std::size_t>(index)];
  }
  // Each count is binomial: mean 6000, standard deviation 65. Five of them: one false alarm in 170000 counts.
  for (const int count : chosen) EXPECT_NEAR(count, kTrials * kChosen / kCount, 5 * 65);
}

TEST(SignBlocks, DecodesToTheMeanMagnitude) {
  const std::vector<float> gradient = {1.0F, -3.0F, 0.0F, -0.0F, 5.0F};
  const Compressed<float> result = sign_blocks<float>(gradient, {}, 4);
  EXPECT_EQ(result.codes, (std::vector<std::int32_t>{0, 1, 0, 1, 0}));
  EXPECT_EQ(result.decompressed, (std::vector<float>{1.0F, -1.0F, 1.0F, -1.0F, 5.0F}));
  EXPECT_EQ(result.residual, (std::vector<float>{0.0F, -2.0F, -1.0F, 1.0F, 0.0F}));
}

TEST(Orthogonalize, GivesOrthonormalVectorsOfTheSameSpanAndZeroForDependentOnes) {
  constexpr std::size_t kLength = 20;
  auto p = random_values<double>(4 * kLength, 9);
  for (std::size_t i = 0; i < kLength; ++i) p[2 * kLength + i] = 3 * p[i] - 2 * p[kLength + i];

  orthogonalize<double>(p, kLength);

  const auto product = [&p](std::size_t a, std::size_t b) {
    return std::inner_product(p.begin() + static_cast<std::ptrdiff_t>(a * kLength),
                              p.begin() + static_cast<std::ptrdiff_t>((a + 1) * kLength),
                              p.begin() + static_cast<std::ptrdiff_t>(b * kLength), 0.0);
  };
  for (std::size_t a = 0; a < 4; ++a) {
    for (std::size_t b = 0; b < 4; ++b) EXPECT_NEAR(product(a, b), a == b && a != 2 ? 1.0 : 0.0, 1e-14) << a << " " << b;
  }
}

struct Ranks {
  std::int64_t rows = 13, columns = 9;
  std::vector<std::vector<double>> gradients;
  explicit Ranks(int count, std::uint64_t seed = 1) {
    for (int n = 0; n < count; ++n) {
      gradients.push_back(random_values(static_cast<std::size_t>(rows * columns), seed + static_cast<std::uint64_t>(n)));
    }
  }
};

TEST(PowerSgd, ConservesPerRankAndSendsTheMean) {
  const Ranks ranks(3);
  std::vector<double> q = power_sgd_start<double>(5, "h.0.w", 2, ranks.columns);
  std::vector<std::vector<double>> residuals;
  std::vector<double> sent(ranks.gradients[0].size()), given = sent;
  for (int step = 0; step < 4; ++step) {
    const PowerSgdStep<double> result = power_sgd<double>(ranks.gradients, residuals, ranks.rows, ranks.columns, q);
    ASSERT_TRUE(result.finite);
    for (std::size_t i = 0; i < sent.size(); ++i) {
      sent[i] += 3 * result.decompressed[i];
      for (const auto& gradient : ranks.gradients) given[i] += gradient[i];
      double kept = 0;
      for (const auto& residual : result.residuals) kept += residual[i];
      EXPECT_NEAR(sent[i] + kept, given[i], 1e-12) << "step " << step << " element " << i;
    }
    residuals = result.residuals;
    q = result.next_q;
  }
}

TEST(PowerSgd, IsLosslessAtFullRankAndApproachesTheBestApproximationWithAWarmStart) {
  const Ranks one(1);
  const auto full = power_sgd_start<double>(5, "w", 9, one.columns);
  const PowerSgdStep<double> lossless = power_sgd<double>(one.gradients, {}, one.rows, one.columns, full);
  EXPECT_LE(relative_l2(lossless.decompressed, one.gradients[0]), 1e-12);

  // diag(3, 2, 1): the best of rank 1 leaves sqrt(4 + 1).
  const std::vector<std::vector<double>> diagonal = {{3, 0, 0, 0, 2, 0, 0, 0, 1}};
  std::vector<double> q = power_sgd_start<double>(5, "w", 1, 3);
  double left = 0;
  for (int step = 0; step < 40; ++step) {
    const PowerSgdStep<double> result = power_sgd<double>(diagonal, {}, 3, 3, q);
    left =
        std::sqrt(std::inner_product(result.residuals[0].begin(), result.residuals[0].end(), result.residuals[0].begin(), 0.0));
    q = result.next_q;
  }
  EXPECT_NEAR(left, std::sqrt(5.0), 1e-9);
}

TEST(PowerSgd, ComesBackAfterAZeroGradient) {
  Ranks ranks(2);
  const std::vector<std::vector<double>> zero(2, std::vector<double>(ranks.gradients[0].size()));
  const auto q = power_sgd_start<double>(5, "w", 2, ranks.columns);
  const PowerSgdStep<double> nothing = power_sgd<double>(zero, {}, ranks.rows, ranks.columns, q);
  EXPECT_EQ(nothing.next_q, q);
  EXPECT_EQ(nothing.decompressed, zero[0]);
}

TEST(PowerSgd, SkipsAStepThatIsNotFiniteOnOneRank) {
  Ranks ranks(2), old(2, 50);
  ranks.gradients[1][7] = NAN;
  const auto q = power_sgd_start<double>(5, "w", 2, ranks.columns);
  const PowerSgdStep<double> result = power_sgd<double>(ranks.gradients, old.gradients, ranks.rows, ranks.columns, q);
  EXPECT_FALSE(result.finite);
  EXPECT_EQ(result.residuals, old.gradients);
  EXPECT_EQ(result.next_q, q);
}

TEST(CompressedBytes, AreThoseOfThePayload) {
  EXPECT_EQ(quantized_bytes(1000, 8, 64), 16 * 4 + 1000);
  EXPECT_EQ(quantized_bytes(1000, 4, 64), 16 * 4 + 500);
  EXPECT_EQ(quantized_bytes(7, 4, 3), 3 * 4 + 2 + 2 + 1) << "blocks do not share a byte";
  EXPECT_EQ(quantized_bytes(0, 4, 3), 0);
  EXPECT_EQ(top_k_bytes(1000, 10), 80);
  EXPECT_EQ(top_k_bytes(3, 10), 24);
  EXPECT_EQ(random_k_bytes(1000, 10), 40);
  EXPECT_EQ(sign_bytes(100, 48), 3 * 4 + 6 + 6 + 1);
  EXPECT_EQ(power_sgd_bytes(768, 3072, 4), 4 * 4 * (768 + 3072));
}

/// Mean over steps of what a constant gradient decodes to: with feedback it approaches the gradient, without it keeps its bias.
TEST(ErrorFeedback, RemovesTheBiasThatStaysWithoutIt) {
  for (const auto& [name, codec] : codecs()) {
    if (name == "random_k") continue;  // its choice is constant here
    constexpr int kSteps = 400;
    const auto gradient = random_values<float>(96, 21);
    std::vector<float> residual;
    std::vector<double> with(gradient.size()), without = with;
    for (int step = 0; step < kSteps; ++step) {
      const Compressed<float> fed = codec(gradient, residual), plain = codec(gradient, {});
      residual = fed.residual;
      for (std::size_t i = 0; i < with.size(); ++i) {
        with[i] += fed.decompressed[i] / static_cast<double>(kSteps);
        without[i] += plain.decompressed[i] / static_cast<double>(kSteps);
      }
    }
    const std::vector<double> truth(gradient.begin(), gradient.end());
    EXPECT_LT(relative_l2(with, truth), 0.3 * relative_l2(without, truth)) << name;
  }
}

}  // namespace
}  // namespace tandem::reference
