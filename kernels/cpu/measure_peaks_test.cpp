// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "kernels/kernels.h"

namespace tandem {
namespace {

TEST(MeasurePeaks, HasABf16PeakWhereBf16IsMultipliedAsItIs) {
  const bool converted = make_cpu_kernels({})->info().bf16_products == "converted to fp32";
  const MeasuredPeaks peaks = measure_peaks(1);
  EXPECT_GT(peaks.fp32_matmul_flops_per_second, 0);
  EXPECT_GT(peaks.memory_bytes_per_second, 0);
  EXPECT_EQ(peaks.bf16_matmul_flops_per_second > 0, !converted);
}

}  // namespace
}  // namespace tandem
