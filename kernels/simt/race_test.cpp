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

/// Exits with 0 where the kernel's results are right.
template <LastBarrier barrier>
void normalize_and_exit() {
  const Stream stream(make_stream());
  std::vector<float> values(4 * kColumns);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  const DeviceArray<float> x(stream.get(), values), y(stream.get(), values.size());
  launch(normalize_rows<barrier>, 4, kThreads, 0, stream.get(), x.data(), y.data());
  float squares = 0;
  for (const float value : y.read()) squares += value * value;
  std::exit(std::fabs(squares / static_cast<float>(values.size()) - 1) < 1e-4F ? 0 : 1);
}

TEST(Races, AKernelWithAllItsBarriersHasNone) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_and_exit(turn_warp_round<LastBarrier::there>), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(normalize_and_exit<LastBarrier::there>(), testing::ExitedWithCode(0), "^$");
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
