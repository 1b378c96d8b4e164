// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/optimizer.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace tandem {
namespace {

OptimizerConfig clipping_at(double norm) {
  OptimizerConfig config;
  config.max_grad_norm = norm;
  return config;
}

TEST(ClipCoefficient, NeverEnlargesAndBringsLongGradientsToTheLimit) {
  EXPECT_EQ(clip_coefficient(clipping_at(1.0), 0.25, {}), 1.0);
  EXPECT_DOUBLE_EQ(clip_coefficient(clipping_at(1.0), 4.0, {}), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(clip_coefficient(clipping_at(0.0), 4.0, {}), 1.0);
}

// Without a loss scale nobody skips such a step: it must spoil the run where all can see it.
TEST(ClipCoefficient, ANormThatIsNoNumberIsNotTakenForAShortOne) {
  EXPECT_TRUE(std::isnan(clip_coefficient(clipping_at(1.0), std::nan(""), {})));
  EXPECT_EQ(clip_coefficient(clipping_at(1.0), std::numeric_limits<double>::infinity(), {}), 0.0);
}

}  // namespace
}  // namespace tandem
