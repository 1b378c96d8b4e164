// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kernels/cuda/block.cuh"
#include "kernels/simt/sanitizers.h"
#include "kernels/simt/shared_variables.h"
#include "kernels/simt/test_support.h"

namespace tandem::simt_gpu {
namespace {

constexpr int kThreads = 96;

__global__ void sum_rows(const float* x, float* sums, float* maxima) {
  const float value = x[blockIdx.x * kThreads + threadIdx.x];
  const float sum = block_sum(value), greatest = block_max(value);
  if (threadIdx.x == 5) sums[blockIdx.x] = sum;
  if (threadIdx.x == 7) maxima[blockIdx.x] = greatest;
}

/// Each thread reads what another one has written.
enum class Barrier { there, missing };
template <Barrier barrier>
__global__ void take_from_neighbour(const float* x, float* y) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = x[threadIdx.x];
  if constexpr (barrier == Barrier::there) __syncthreads();
  y[threadIdx.x] = values[(threadIdx.x + 33) % kThreads];
}

/// Whether everything shared was 0xFF when the block began; then it no longer is.
__global__ void look_at_fresh_shared_memory(int* fresh) {
  __shared__ unsigned fixed[kThreads];
  GPU_DYNAMIC_SHARED(unsigned, dynamic);
  const int i = static_cast<int>(threadIdx.x);
  const int both = fixed[i] == ~0U && dynamic[i] == ~0U ? 1 : 0;
  fresh[blockIdx.x * kThreads + threadIdx.x] = both;
  fixed[i] = 0;
  dynamic[i] = 0;
}

__global__ void write_beyond_dynamic(int count) {
  GPU_DYNAMIC_SHARED(unsigned, dynamic);
  if (threadIdx.x == 0) dynamic[count] = 1;
}

constexpr int kLineOfFirstBarrier = __LINE__ + 3;
__global__ void meet_in_two_places() {
  if (threadIdx.x < 8) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void leave_before_barrier() {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
__global__ void mix_barrier_and_shuffle(float* y) {
  if (threadIdx.x < 32) {
    y[threadIdx.x] = warp_sum(1.0F);
  } else if (threadIdx.x < 40) {
    __syncwarp(0xFFFF);
  }
  __syncthreads();
}

enum class Mistake { leaves_out_caller, names_absent, names_one_that_left, reads_outside };
template <Mistake mistake>
__global__ void use_wrong_mask(int* y) {
  const int lane = static_cast<int>(threadIdx.x);
  if constexpr (mistake == Mistake::leaves_out_caller) __syncwarp(0x0000FFFF);
  if constexpr (mistake == Mistake::names_absent) y[lane] = __shfl_sync(kFullMask, lane, 0);
  if constexpr (mistake == Mistake::names_one_that_left) {
    if (lane == 5) return;
    y[lane] = __shfl_sync(kFullMask, lane, 0);
  }
  if constexpr (mistake == Mistake::reads_outside) {
    if (lane < 16) y[lane] = __shfl_sync(0xFFFFU, lane, 20);
  }
}

__global__ void exchange_in_halves(int* y) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned mask = lane < 16 ? 0xFFFFU : 0xFFFF0000U;
  int sum = lane;
  if (lane < 16) sum += __shfl_xor_sync(mask, lane, 1);  // this half meets once more often
  y[lane] = sum + __shfl_down_sync(mask, lane, 3, 16) * 100;
  y[32 + lane] = static_cast<int>(__ballot_sync(kFullMask, lane % 3 == 0 ? 1 : 0));
  y[64 + lane] = __syncthreads_count(lane < 7 ? 1 : 0) * 10 + __syncthreads_or(lane == 31 ? 1 : 0);
}

__global__ void count_with_atomics(int* count) { atomicAdd(count, static_cast<int>(threadIdx.x)); }

/// Which thread of all comes first, second, ..., before a barrier and behind it.
__global__ void write_down_order(int* counters, int* order) {
  const int threads = static_cast<int>(gridDim.x * blockDim.x), thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  order[atomicAdd(counters, 1)] = thread;
  __syncthreads();
  order[threads + atomicAdd(counters + 1, 1)] = thread;
}

class Blocks : public testing::Test {
 protected:
  Stream stream_{make_stream()};
  StreamHandle stream() { return stream_.get(); }

  template <Barrier barrier>
  std::vector<float> neighbours(std::uint64_t seed) {
    std::vector<float> values(kThreads);
    std::iota(values.begin(), values.end(), 1.0F);
    const DeviceArray<float> x(stream(), values), y(stream(), kThreads);
    set_thread_order(stream(), seed);
    launch(take_from_neighbour<barrier>, 1, kThreads, 0, stream(), x.data(), y.data());
    return y.read();
  }
  template <Mistake mistake>
  std::string error_of_mask(unsigned threads) {
    const Stream own(make_stream());
    const DeviceArray<int> y(own.get(), 64);
    launch(use_wrong_mask<mistake>, 1, threads, 0, own.get(), y.data());
    return error_of(own.get());
  }
};

TEST_F(Blocks, SumsAndMaximaAreTheSameInEveryOrderOfThreads) {
  std::vector<float> values(3 * kThreads);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i)) + (i == 100 ? 7.0F : 0.0F);
  const DeviceArray<float> x(stream(), values);
  std::vector<float> first;
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    const DeviceArray<float> sums(stream(), 3), maxima(stream(), 3);
    set_thread_order(stream(), seed);
    launch(sum_rows, 3, kThreads, 0, stream(), x.data(), sums.data(), maxima.data());

    const std::vector<float> sum = sums.read(), greatest = maxima.read();

    if (first.empty()) first = sum;
    EXPECT_EQ(sum, first) << "seed " << seed;
    for (std::size_t row = 0; row < 3; ++row) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row) * kThreads;
      EXPECT_NEAR(sum[row], std::accumulate(begin, begin + kThreads, 0.0), 1e-5);
      EXPECT_EQ(greatest[row], *std::max_element(begin, begin + kThreads));
    }
  }
}

TEST_F(Blocks, TheOrderOfThreadsAndBlocksIsTheSeedsAndAnotherBehindEachBarrier) {
  const auto order_of = [&](std::uint64_t seed) {
    const DeviceArray<int> counters(stream(), std::vector<int>{0, 0}), order(stream(), 2 * 4 * 64);
    set_thread_order(stream(), seed);
    launch(write_down_order, 4, 64, 0, stream(), counters.data(), order.data());
    return order.read();
  };
  const std::vector<int> ascending = order_of(0), one = order_of(1), two = order_of(2);
  EXPECT_TRUE(std::is_sorted(ascending.begin(), ascending.begin() + 256));
  EXPECT_EQ(one, order_of(1));
  EXPECT_NE(one, two);
  EXPECT_FALSE(std::equal(one.begin(), one.begin() + 256, one.begin() + 256));
  EXPECT_NE(std::vector<int>({one[0] / 64, one[64] / 64, one[128] / 64, one[192] / 64}), (std::vector<int>{0, 1, 2, 3}));
}

TEST_F(Blocks, AMissingBarrierShowsAsNotANumber) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "it reports the race, and race_test.cpp has one";
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    const std::vector<float> right = neighbours<Barrier::there>(seed), wrong = neighbours<Barrier::missing>(seed);

    for (int i = 0; i < kThreads; ++i) EXPECT_EQ(right[static_cast<std::size_t>(i)], static_cast<float>((i + 33) % kThreads + 1));
    EXPECT_TRUE(std::any_of(wrong.begin(), wrong.end(), [](float value) { return std::isnan(value); })) << "seed " << seed;
  }
}

TEST_F(Blocks, SharedMemoryIsPoisonedForEveryBlock) {
  if (shared_variables().count() == 0) GTEST_SKIP() << "this program has no symbol table";
  const DeviceArray<int> fresh(stream(), 4 * kThreads);
  launch(look_at_fresh_shared_memory, 4, kThreads, kThreads * 4, stream(), fresh.data());
  launch(look_at_fresh_shared_memory, 4, kThreads, kThreads * 4, stream(), fresh.data());
  EXPECT_EQ(fresh.read(), std::vector<int>(4 * kThreads, 1));
}

TEST_F(Blocks, AWriteBeyondDynamicSharedMemoryIsAnError) {
  launch(write_beyond_dynamic, 1, kThreads, 400, stream(), 99);
  EXPECT_EQ(error_of(stream()), "");
  if (under_address_sanitizer()) GTEST_SKIP() << "which reports the write itself";
  launch(write_beyond_dynamic, 1, kThreads, 400, stream(), 100);
  EXPECT_NE(error_of(stream()).find("wrote to byte 400 of 400"), std::string::npos) << error_of(stream());
}

TEST_F(Blocks, BarriersInTwoPlacesAreAnErrorThatNamesBoth) {
  launch(meet_in_two_places, 1, 32, 0, stream());
  const std::string error = error_of(stream());
  EXPECT_NE(error.find(":" + std::to_string(kLineOfFirstBarrier) + " waits"), std::string::npos) << error;
  EXPECT_NE(error.find(":" + std::to_string(kLineOfFirstBarrier + 2) + " in"), std::string::npos) << error;
}

TEST_F(Blocks, ABarrierAfterAThreadHasLeftIsAnError) {
  launch(leave_before_barrier, 1, 32, 0, stream());
  EXPECT_NE(error_of(stream()).find("1 of 32 threads have left"), std::string::npos) << error_of(stream());
}

TEST_F(Blocks, AWarpThatWaitsForLanesAtABarrierIsAnError) {
  const DeviceArray<float> y(stream(), 64);
  launch(mix_barrier_and_shuffle, 1, 64, 0, stream(), y.data());
  EXPECT_NE(error_of(stream()).find("mask 0xffff"), std::string::npos) << error_of(stream());
}

TEST_F(Blocks, WrongMasksAreErrors) {
  EXPECT_NE(error_of_mask<Mistake::leaves_out_caller>(32).find("leaves out its caller"), std::string::npos);
  EXPECT_NE(error_of_mask<Mistake::names_absent>(20).find("names lane 20, which the block does not have"), std::string::npos);
  EXPECT_NE(error_of_mask<Mistake::names_one_that_left>(32).find("names lane 5, which has left"), std::string::npos);
  EXPECT_NE(error_of_mask<Mistake::reads_outside>(32).find("reads a lane that its mask leaves out"), std::string::npos);
}

TEST_F(Blocks, AnErrorStaysWithItsStreamAndLeavesOthersAlone) {
  launch(meet_in_two_places, 1, 64, 0, stream());
  EXPECT_NE(error_of(stream()), "");
  EXPECT_NE(error_of(stream()), "") << "an error must not be forgotten";

  const Stream other(make_stream());
  const DeviceArray<int> count(other.get(), std::vector<int>{0});
  launch(count_with_atomics, 5, 64, 0, other.get(), count.data());
  EXPECT_EQ(count.read(), std::vector<int>{5 * 63 * 64 / 2});
}

TEST_F(Blocks, WarpOperationsOfHalfWarpsMeetApart) {
  const DeviceArray<int> result(stream(), 96);
  for (const std::uint64_t seed : {0, 1, 2}) {
    set_thread_order(stream(), seed);
    launch(exchange_in_halves, 1, 32, 0, stream(), result.data());
    const std::vector<int> y = result.read();
    for (int lane = 0; lane < 32; ++lane) {
      const int sum = lane < 16 ? lane + (lane ^ 1) : lane, from = lane % 16 + 3 < 16 ? lane + 3 : lane;
      EXPECT_EQ(y[static_cast<std::size_t>(lane)], sum + 100 * from);
      EXPECT_EQ(y[static_cast<std::size_t>(32 + lane)], 0x49249249);
      EXPECT_EQ(y[static_cast<std::size_t>(64 + lane)], 71);
    }
  }
}

TEST_F(Blocks, LaunchesThatCudaRefusesAreRefused) {
  EXPECT_THROW(launch(leave_before_barrier, 1, 1025, 0, stream()), GpuError);
  EXPECT_THROW(launch(leave_before_barrier, 0, 32, 0, stream()), GpuError);
  EXPECT_THROW(launch(leave_before_barrier, 1, 32, 228 * 1024, stream()), GpuError);
  EXPECT_THROW(launch(leave_before_barrier, dim3(1, 65536), 32, 0, stream()), GpuError);
}

}  // namespace
}  // namespace tandem::simt_gpu
