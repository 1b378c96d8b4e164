// SPDX-License-Identifier: Apache-2.0
#include "core/optimizer_config.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(OptimizerConfig, KindsHaveTheNamesOfConfigurations) {
  EXPECT_EQ(name(OptimizerKind::adamw), "adamw");
  EXPECT_EQ(name(OptimizerKind::sgd), "sgd");
  EXPECT_EQ(name(ScheduleKind::constant), "constant");
  EXPECT_EQ(name(ScheduleKind::cosine), "cosine");
}

}  // namespace
}  // namespace tandem
