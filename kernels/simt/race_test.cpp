// SPDX-License-Identifier: Apache-2.0
// Data races within a block, which no schedule may show in a result: the thread sanitizer sees CUDA threads as threads, ordered
// by CUDA's synchronisation alone.
#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/cuda/block.cuh"
#include "kernels/simt/sanitizers.h"
#include "kernels/simt/test_support.h"

namespace tandem::simt_gpu {
namespace {

constexpr int kThreads = 96, kColumns = 200;

enum class LastBarrier { there, missing };

/// block_sum(), perhaps with the barrier left out that keeps the next call's write behind this one's reads.
template <LastBarrier barrier>
__device__ float sum_of_block(float value) {
  __shared__ float sums[kWarpSize];
  value = warp_sum(value);
  if (lane_index() == 0) sums[warp_index()] = value;
  __syncthreads();
  value = warp_sum(lane_index() < num_warps() ? sums[lane_index()] : 0.0F);
  if constexpr (barrier == LastBarrier::there) __syncthreads();
  return value;
}

/// y = x - mean, divided by the standard deviation: two sums one after the other.
template <LastBarrier barrier>
__global__ void normalize_rows(const float* x, float* y) {
  x += blockIdx.x * kColumns;
  y += blockIdx.x * kColumns;
  float sum = 0;
  for (unsigned i = threadIdx.x; i < kColumns; i += blockDim.x) sum += x[i];
  const float mean = sum_of_block<barrier>(sum) / kColumns;
  float squares = 0;
  for (unsigned i = threadIdx.x; i < kColumns; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
  const float scale = rsqrtf(sum_of_block<barrier>(squares) / kColumns);
  for (unsigned i = threadIdx.x; i < kColumns; i += blockDim.x) y[i] = (x[i] - mean) * scale;
}

/// Between the same two barriers. In ascending order the writer has come to the second one before the reader leaves the first.
__global__ void read_beside_write(float* y) {
  __shared__ float value;
  __syncthreads();
  if (threadIdx.x == 0) value = 1;
  if (threadIdx.x == 1) y[0] = value;
  __syncthreads();
}

template <LastBarrier barrier>
__global__ void turn_warp_round(float* y) {
  __shared__ float values[kWarpSize];
  values[threadIdx.x] = 1;
  if constexpr (barrier == LastBarrier::there) __syncwarp();
  y[threadIdx.x] = values[kWarpSize - 1 - threadIdx.x];
}

/// One block, threads in ascending order; the sanitizer makes 66 of 0 where it has reported something.
void run_and_exit(void (*kernel)(float*)) {
  const Stream stream(make_stream());
  const DeviceArray<float> y(stream.get(), std::vector<float>(kWarpSize));
  set_thread_order(stream.get(), 0);
  launch(kernel, 1, kWarpSize, 0, stream.get(), y.data());
  synchronize(stream.get());
  std::exit(0);
}

/// Whether the kernel's results are right: in every row the sum is 0 and that of the squares the number of columns.
template <LastBarrier barrier>
bool normalizes(std::uint64_t thread_order_seed) {
  const Stream stream(make_stream());
  set_thread_order(stream.get(), thread_order_seed);
  std::vector<float> values(4 * kColumns);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  const DeviceArray<float> x(stream.get(), values), y(stream.get(), values.size());
  launch(normalize_rows<barrier>, 4, kThreads, 0, stream.get(), x.data(), y.data());
  const std::vector<float> normalized = y.read();
  bool right = true;
  for (std::size_t row = 0; row < 4; ++row) {
    float sum = 0, squares = 0;
    for (std::size_t i = row * kColumns; i < (row + 1) * kColumns; ++i) {
      sum += normalized[i];
      squares += normalized[i] * normalized[i];
    }
    right &= std::fabs(sum) < 1e-3F && std::fabs(squares - kColumns) < 1e-2F;
  }
  return right;
}

/// Exits with 0 where the kernel's results are right.
template <LastBarrier barrier>
void normalize_and_exit() {
  std::exit(normalizes<barrier>(0) ? 0 : 1);
}

TEST(Races, AKernelWithAllItsBarriersHasNone) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_and_exit(turn_warp_round<LastBarrier::there>), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(normalize_and_exit<LastBarrier::there>(), testing::ExitedWithCode(0), "^$");
}

// Without the sanitizer, too: some warps go on to the next barrier before others have left the last one.
TEST(Races, AWarpThatRunsAheadOverwritesWhatOthersStillRead) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "the sanitizer would end the process";
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    EXPECT_TRUE(normalizes<LastBarrier::there>(seed)) << seed;
    if (!normalizes<LastBarrier::missing>(seed)) ++wrong;
  }
  EXPECT_GE(wrong, 8);
}

TEST(Races, AWriteThatIsNotOrderedWithAReadIsReported) {
  if (!under_thread_sanitizer()) GTEST_SKIP() << "needs -fsanitize=thread";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_and_exit(read_beside_write), testing::ExitedWithCode(66), "data race.*race_test.cpp");
  EXPECT_EXIT(run_and_exit(turn_warp_round<LastBarrier::missing>), testing::ExitedWithCode(66), "data race.*race_test.cpp");
  EXPECT_EXIT(normalize_and_exit<LastBarrier::missing>(), testing::ExitedWithCode(66), "data race.*race_test.cpp");
}

}  // namespace
}  // namespace tandem::simt_gpu
