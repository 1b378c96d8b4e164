// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/power_sgd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/compression_test_support.h"

namespace tandem {
namespace {

using Ranks = std::vector<Floats>;

double relative_error(const Floats& got, const std::vector<double>& expected) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - expected[i], 2);
    size += expected[i] * expected[i];
  }
  return std::sqrt(difference / size);
}

std::vector<double> doubled(const Floats& values) { return {values.begin(), values.end()}; }

Floats mean(const Ranks& of_rank) {
  Floats result(of_rank[0].size());
  for (const Floats& values : of_rank) {
    for (std::size_t i = 0; i < values.size(); ++i) result[i] += values[i];
  }
  for (float& value : result) value /= static_cast<float>(of_rank.size());
  return result;
}

struct Step {
  Floats p, q, next_q, decompressed;
  Ranks residuals, own;
};

Step power_sgd_step(const PowerSgdShape& shape, const Ranks& gradients, const Ranks& residuals, const Floats& start,
                    InstructionSet set) {
  Step step;
  Ranks p_of_rank;
  const auto rows = static_cast<std::size_t>(shape.rank * shape.rows),
             columns = static_cast<std::size_t>(shape.rank * shape.columns);
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    step.residuals.emplace_back(gradients[n].size(), 777.0F);
    p_of_rank.emplace_back(rows, 777.0F);
    const std::span<const float> residual = residuals.empty() ? std::span<const float>() : std::span<const float>(residuals[n]);
    EXPECT_TRUE(power_sgd_project(shape, gradients[n], residual, start, step.residuals[n], p_of_rank[n], set));
  }
  step.p = mean(p_of_rank);
  power_sgd_orthogonalize(shape, step.p);
  for (Floats& c : step.residuals) {
    step.own.emplace_back(columns, 777.0F);
    EXPECT_TRUE(power_sgd_back_project(shape, c, step.p, step.own.back(), set));
    power_sgd_subtract(shape, step.p, step.own.back(), c, set);
  }
  step.q = mean(step.own);
  step.decompressed.assign(gradients[0].size(), 777.0F);
  power_sgd_decompress(shape, step.p, step.q, step.decompressed, set);
  step.next_q = start;
  power_sgd_next_start(shape, step.q, step.next_q);
  return step;
}

/// A decaying spectrum and noise, as gradients of layers have.
Ranks gradients_of(const PowerSgdShape& shape, int count, std::uint64_t seed) {
  Ranks ranks;
  for (int n = 0; n < count; ++n) {
    Floats gradient = normal_values(shape.rows * shape.columns, seed + static_cast<std::uint64_t>(n), 0.1);
    for (std::uint64_t term = 0; term < 4; ++term) {
      const Floats left = normal_values(shape.rows, 100 + term), right = normal_values(shape.columns, 200 + term);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        gradient[i] += left[i / right.size()] * right[i % right.size()] / static_cast<float>(1 + term);
      }
    }
    ranks.push_back(gradient);
  }
  return ranks;
}

std::vector<std::vector<double>> doubled(const Ranks& ranks) {
  std::vector<std::vector<double>> result;
  for (const Floats& values : ranks) result.push_back(doubled(values));
  return result;
}

class PowerSgdShapes : public testing::TestWithParam<PowerSgdShape> {};

/// The error of the float reference against the double one is the yardstick; the longest reduction is over rows or columns.
TEST_P(PowerSgdShapes, StaysWithinTheRoundingOfTheReference) {
  const PowerSgdShape shape = GetParam();
  const double floor = 0x1p-24 * std::sqrt(static_cast<double>(std::max(shape.rows, shape.columns)));
  for (const InstructionSet set : usable_instruction_sets()) {
    Floats start(static_cast<std::size_t>(shape.rank * shape.columns));
    power_sgd_start(shape, 5, "h.0.w", start);
    Ranks residuals;
    for (std::uint64_t step = 0; step < 3; ++step) {
      const Ranks gradients = gradients_of(shape, 3, 31 + 10 * step);
      const auto truth =
          reference::power_sgd<double>(doubled(gradients), doubled(residuals), shape.rows, shape.columns, doubled(start));
      const auto plain = reference::power_sgd<float>(gradients, residuals, shape.rows, shape.columns, start);
      const Step got = power_sgd_step(shape, gradients, residuals, start, set);
      const auto within = [&](const char* what, const Floats& values, const Floats& reference_values,
                              const std::vector<double>& expected) {
        const double bound = 4 * std::max(relative_error(reference_values, expected), floor);
        EXPECT_LE(relative_error(values, expected), bound) << name(set) << " step " << step << " " << what;
      };
      within("p", got.p, plain.p, truth.p);
      within("q", got.q, plain.q, truth.q);
      within("next_q", got.next_q, plain.next_q, truth.next_q);
      within("decompressed", got.decompressed, plain.decompressed, truth.decompressed);
      if (shape.rank < std::min(shape.rows, shape.columns)) {
        within("residual", got.residuals[1], plain.residuals[1], truth.residuals[1]);
      }
      residuals = got.residuals;
      start = got.next_q;
    }
  }
}

TEST_P(PowerSgdShapes, ConservesOnEveryRank) {
  const PowerSgdShape shape = GetParam();
  const Ranks gradients = gradients_of(shape, 2, 3), old = gradients_of(shape, 2, 50);
  Floats start(static_cast<std::size_t>(shape.rank * shape.columns));
  power_sgd_start(shape, 5, "w", start);
  const Step got = power_sgd_step(shape, gradients, old, start, best_instruction_set());
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    Floats sent(gradients[n].size());
    power_sgd_decompress(shape, got.p, got.own[n], sent);
    for (std::size_t i = 0; i < sent.size(); ++i) {
      const float c = gradients[n][i] + old[n][i];
      const double lost = static_cast<double>(sent[i]) + static_cast<double>(got.residuals[n][i]) - c;
      EXPECT_LE(std::abs(lost), 0x1p-24 * std::abs(got.residuals[n][i])) << n << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PowerSgdShapes,
                         testing::Values(PowerSgdShape{1, 1, 1}, PowerSgdShape{5, 1, 1}, PowerSgdShape{1, 9, 1},
                                         PowerSgdShape{13, 17, 2}, PowerSgdShape{32, 48, 4}, PowerSgdShape{67, 1500, 5},
                                         PowerSgdShape{300, 33, 9}),
                         [](const auto& instance) {
                           const PowerSgdShape& shape = instance.param;
                           return fmt::format("rows{}_columns{}_rank{}", shape.rows, shape.columns, shape.rank);
                         });

TEST(PowerSgdCodec, GivesTheSameBitsOnEveryInstructionSet) {
  const PowerSgdShape shape = {67, 300, 5};
  const Ranks gradients = gradients_of(shape, 1, 3);
  Floats start(5 * 300);
  power_sgd_start(shape, 5, "w", start);
  const Step best = power_sgd_step(shape, gradients, {}, start, best_instruction_set());
  for (const InstructionSet set : usable_instruction_sets()) {
    const Step other = power_sgd_step(shape, gradients, {}, start, set);
    EXPECT_EQ(bits_of(other.residuals[0]), bits_of(best.residuals[0])) << name(set);
    EXPECT_EQ(bits_of(other.decompressed), bits_of(best.decompressed)) << name(set);
  }
}

TEST(PowerSgdCodec, FlagsWhatIsNotFiniteAndWhatOverflowsInTheProducts) {
  const PowerSgdShape shape = {8, 20, 2};
  Floats start(40), c(160), p(16);
  power_sgd_start(shape, 5, "w", start);
  Floats gradient = normal_values(160, 3);
  EXPECT_TRUE(power_sgd_project(shape, gradient, {}, start, c, p));
  EXPECT_TRUE(power_sgd_project(shape, gradient, {}, start, {}, p)) << "without error feedback";
  gradient[157] = NAN;
  EXPECT_FALSE(power_sgd_project(shape, gradient, {}, start, c, p));
  std::ranges::fill(gradient, 3e38F);
  EXPECT_FALSE(power_sgd_project(shape, gradient, {}, start, c, p));
}

TEST(PowerSgdCodec, ComesBackAfterAZeroGradientAndDropsDependentVectors) {
  const PowerSgdShape shape = {6, 7, 3};
  Floats start(21);
  power_sgd_start(shape, 5, "w", start);
  const Step zero = power_sgd_step(shape, {Floats(42)}, {}, start, best_instruction_set());
  EXPECT_EQ(zero.next_q, start);
  EXPECT_EQ(zero.decompressed, Floats(42));

  Floats rank_one(42);
  for (std::size_t i = 0; i < 42; ++i) rank_one[i] = static_cast<float>(1 + i / 7) * static_cast<float>(2 + i % 7);
  const Step one = power_sgd_step(shape, {rank_one}, {}, start, best_instruction_set());
  EXPECT_TRUE(std::all_of(one.p.begin() + 6, one.p.end(), [](float value) { return value == 0.0F; }));
  for (std::size_t i = 0; i < 42; ++i) EXPECT_NEAR(one.decompressed[i], rank_one[i], 1e-6F * 48);
}

TEST(PowerSgdCodec, CountsBytesAndChecksSizes) {
  EXPECT_EQ(power_sgd_bytes({768, 3072, 4}), reference::power_sgd_bytes(768, 3072, 4));
  Floats p(10);
  EXPECT_THROW(power_sgd_orthogonalize({6, 7, 3}, p), ContractError);
  EXPECT_THROW(power_sgd_decompress({5, 5, 2}, p, p, p), ContractError);
}

}  // namespace
}  // namespace tandem
