// SPDX-License-Identifier: Apache-2.0
#include "suites/power_sgd_rounding.h"

#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

using Matrix = std::vector<double>;
const reference::CodedTensor kTensor{"matrix", 3, 3};
const Matrix kDiagonal = {3, 0, 0, 0, 2, 0, 0, 0, 1};  // |C|^2 = 14

TEST(PowerSgdRounding, IsThatOfTheMatrixAndOfWhatTheDirectionTurnsInto) {
  const std::vector<double> start = {1, 0, 0};  // P = (3, 0, 0), t^2 = 14 / 9
  const PowerSgdRounding rounding = power_sgd_rounding(kTensor, {kDiagonal}, start);
  EXPECT_DOUBLE_EQ(rounding.residuals.front(), 14 + 14.0 / 9 * (9 + 5));
  EXPECT_DOUBLE_EQ(rounding.sum, rounding.residuals.front());
}

TEST(PowerSgdRounding, IsLargeWhereADirectionHasLittleOfItsOwn) {
  const Matrix whole = {3, 0, 0, 0, 2, 0, 0, 0, 0};  // both factors hold it: nothing is turned into
  const auto residual_with = [&](double own) {
    return power_sgd_rounding(kTensor, {whole}, std::vector<double>{1, 0, 0, 1, own, 0}).residuals.front();
  };
  // t_1^2 = 13 / 9; t_2^2 = 13 (1 + own^2) / (2 own)^2
  EXPECT_NEAR(residual_with(1), 13 + 13.0 / 9 * 9 + 13.0 * 2 / 4 * 4, 1e-9);
  EXPECT_NEAR(residual_with(1e-3), 13 + 13 + 13 * (1 + 1e-6) / 1e-6, 1e-3);
}

TEST(PowerSgdRounding, OfADirectionThatIsDroppedIsNone) {
  const Matrix rank_one = {3, 0, 0, 0, 0, 0, 0, 0, 0};
  const PowerSgdRounding rounding = power_sgd_rounding(kTensor, {rank_one}, std::vector<double>{1, 0, 0, 1, 1, 0});
  EXPECT_DOUBLE_EQ(rounding.residuals.front(), 9 + 9);
}

TEST(PowerSgdRounding, OfRanksThatCancelIsThatOfTheirTerms) {
  Matrix opposite = kDiagonal;
  for (double& value : opposite) value = -value;
  opposite[0] = -2;
  const PowerSgdRounding rounding = power_sgd_rounding(kTensor, {kDiagonal, opposite}, std::vector<double>{1, 0, 0});
  // The sum is (1, 0, ...): t^2 = (14 + 9) / 1, of |p^T C|^2 = 1 and nothing beside it.
  EXPECT_DOUBLE_EQ(rounding.sum, 23 + 23);
  EXPECT_DOUBLE_EQ(rounding.residuals[0], 14 + 23.0 * 14);
}

}  // namespace
}  // namespace tandem
