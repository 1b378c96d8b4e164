// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/buckets.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

std::vector<LocalParameter> whole_model() { return local_parameters(GptConfig{}, {}, ProcessGrid(TrainingPlan{}), 0); }

TEST(GradientBuckets, CoverEveryElementOnceInBackwardOrder) {
  const std::vector<LocalParameter> parameters = whole_model();
  for (const std::int64_t bucket_bytes : {0, 1, 1000, 70000, 100000000}) {
    const std::vector<GradientBucket> buckets = gradient_buckets(parameters, bucket_bytes, 4);

    EXPECT_EQ(buckets.front().elements.end, num_parameters(GptConfig{}));
    EXPECT_EQ(buckets.back().elements.begin, 0);
    for (std::size_t i = 1; i < buckets.size(); ++i) {
      EXPECT_EQ(buckets[i].elements.end, buckets[i - 1].elements.begin);
      EXPECT_EQ(buckets[i].parameters.end, buckets[i - 1].parameters.begin);
    }
  }
}

TEST(GradientBuckets, HoldNoMoreThanTheirSizeUnlessOneTensorIsLarger) {
  const std::vector<LocalParameter> parameters = whole_model();
  constexpr std::int64_t kBytes = 20000;

  for (const GradientBucket& bucket : gradient_buckets(parameters, kBytes, 4)) {
    EXPECT_TRUE(bucket.elements.size() * 4 <= kBytes || bucket.parameters.size() == 1) << bucket.elements.size();
  }
}

TEST(GradientBuckets, OfZeroBytesAreOneBucket) { EXPECT_EQ(gradient_buckets(whole_model(), 0, 4).size(), 1U); }

TEST(GradientBuckets, OfOneByteAreOnePerTensor) {
  const std::vector<LocalParameter> parameters = whole_model();
  EXPECT_EQ(gradient_buckets(parameters, 1, 4).size(), parameters.size());
}

}  // namespace
}  // namespace tandem
