// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/vector_access.cuh"

/// Kernels that hold a row in registers: a warp takes one, or for wide rows a block of up to 16 warps. Every tensor then crosses
/// the memory bus once. What registers don't hold (fp64, rows of odd length, addresses that are no multiple of 16, very wide
/// rows) goes to plain kernels: a block per row that reads it anew for every sum, mostly from the cache.
namespace tandem::TANDEM_GPU {

inline constexpr int kPacks = 4;           // of a thread's row, 16 bytes each
inline constexpr int kWarpRows = 8;        // rows of a block whose warps take one each
inline constexpr int kMostThreads = 512;   // of a row
inline constexpr int kPlainThreads = 256;  // of a block where rows are not held

/// The sums of `values` over the threads of a row, in all of them. In a block, `place` must be another one at each call.
template <bool kWarp, int count, class Real>
__device__ __forceinline__ void sum_over_row(Real (&values)[count], Real (*place)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) values[i] += __shfl_xor_sync(0xFFFFFFFFU, values[i], distance);
  }
  if constexpr (!kWarp) {
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) place[warp][i] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; ++i) {
      values[i] = place[0][i];
      for (int w = 1; w < warps; ++w) values[i] += place[w][i];
    }
  }
}

template <class Real>
__device__ __forceinline__ Real reciprocal_root(Real value) {
  if constexpr (sizeof(Real) == 8) {
    return 1 / sqrt(value);
  } else {
    return rsqrtf(value);
  }
}

/// Of the thread in its row: the first of its packs, how far apart they are, which row.
struct RowPlace {
  std::int64_t row;
  int first, step;
};
template <bool kWarp>
__device__ __forceinline__ RowPlace row_place() {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kWarp) {
    return {static_cast<std::int64_t>(blockIdx.x) * kWarpRows + thread / 32, thread % 32, 32};
  } else {
    return {static_cast<std::int64_t>(blockIdx.x), thread, static_cast<int>(blockDim.x)};
  }
}

/// How a kernel that holds rows is launched: with kWarp where `by_warp`. Not `held`: not at all.
struct RowLaunch {
  bool held = false, by_warp = false;
  dim3 grid, block;
};
template <class T>
RowLaunch row_launch(std::int64_t tokens, std::int64_t hidden, bool aligned) {
  RowLaunch launch;
  if (sizeof(T) == 8 || !aligned || hidden % kPerVector<T> != 0) return launch;
  const std::int64_t packs = hidden / kPerVector<T>;
  int threads = 32;
  while (threads * kPacks < packs && threads < kMostThreads) threads *= 2;
  launch.held = threads * kPacks >= packs;
  launch.by_warp = threads == 32;
  launch.grid = dim3(static_cast<unsigned>(launch.by_warp ? (tokens + kWarpRows - 1) / kWarpRows : tokens));
  launch.block = dim3(static_cast<unsigned>(launch.by_warp ? kWarpRows * 32 : threads));
  return launch;
}

}  // namespace tandem::TANDEM_GPU
