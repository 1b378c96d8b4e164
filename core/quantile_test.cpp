// SPDX-License-Identifier: Apache-2.0
#include "core/quantile.h"

#include <cmath>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Quantile, InterpolatesLinearly) {
  const std::vector<double> sorted = {1, 2, 4, 8, 16};
  EXPECT_DOUBLE_EQ(quantile(sorted, 0), 1);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.5), 4);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.1), 1.4);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.9), 12.8);
  EXPECT_DOUBLE_EQ(quantile(sorted, 1), 16);
  EXPECT_DOUBLE_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_TRUE(std::isnan(median({})));
}

}  // namespace
}  // namespace tandem
