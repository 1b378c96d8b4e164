// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/epoch_order.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "reference/data_pipeline.h"

namespace tandem {
namespace {

TEST(EpochOrder, EqualsTheListOfTheReference) {
  for (const std::int64_t samples : {1, 2, 5, 255, 256, 257, 1023, 1025, 4097}) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{7}, ~std::uint64_t{0}}) {
      for (const std::int64_t epoch : {0, 1, 99}) {
        const EpochOrder order(samples, seed, epoch);
        std::vector<std::int64_t> places;
        for (std::int64_t place = 0; place < samples; ++place) places.push_back(order.sample(place));
        EXPECT_EQ(places, reference::epoch_permutation(samples, seed, epoch)) << samples << " samples, epoch " << epoch;
      }
    }
  }
}

TEST(EpochOrder, CoversSizesBeyond32Bits) {
  for (const std::int64_t samples :
       {(std::int64_t{1} << 32) + 1, std::int64_t{1} << 40, (std::int64_t{1} << 62) - 5, std::int64_t{1} << 62}) {
    const EpochOrder order(samples, 1, 0);
    std::set<std::int64_t> seen;
    bool beyond_32_bits = false;
    for (std::int64_t i = 0; i < 1000; ++i) {
      const std::int64_t sample = order.sample(samples - 1 - i);
      EXPECT_GE(sample, 0);
      EXPECT_LT(sample, samples);
      beyond_32_bits |= sample > std::int64_t{1} << 32;
      seen.insert(sample);
    }
    EXPECT_EQ(seen.size(), 1000U);
    EXPECT_TRUE(beyond_32_bits || samples == (std::int64_t{1} << 32) + 1);
  }
}

TEST(EpochOrder, RefusesPlacesThatDoNotExist) {
  EXPECT_THROW(EpochOrder(0, 1, 0), ContractError);
  EXPECT_THROW((void)EpochOrder(5, 1, 0).sample(5), ContractError);
  EXPECT_THROW((void)EpochOrder(5, 1, 0).sample(-1), ContractError);
}

}  // namespace
}  // namespace tandem
