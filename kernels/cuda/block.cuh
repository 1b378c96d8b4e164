// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/launch.cuh"

/// Sums and maxima of a warp or a block, in an order that depends on the number of threads only: the same bits in every run.
namespace tandem::TANDEM_GPU {

/// Every lane gets the sum of the 32; all lanes of the warp must call it.
template <class T>
__device__ inline T warp_sum(T value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullMask, value, distance);
  return value;
}

/// NaN where a lane has NaN: a loss that is not a number must not vanish in a maximum.
template <class T>
__device__ inline T larger(T a, T b) {
  return a > b || a != a ? a : b;
}

template <class T>
__device__ inline T warp_max(T value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

/// Position of this thread in its block's warps; blocks here are one-dimensional, a multiple of 32 wide, 1024 at most.
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ inline int num_warps() { return static_cast<int>(blockDim.x) / kWarpSize; }

/// Every thread gets the sum of the block's values: within warps, then of the warps' sums. All threads must call it. It begins
/// and ends with what makes the next call safe.
template <class T>
__device__ inline T block_sum(T value) {
  __shared__ T sums[kWarpSize];
  value = warp_sum(value);
  if (lane_index() == 0) sums[warp_index()] = value;
  __syncthreads();
  value = warp_sum(lane_index() < num_warps() ? sums[lane_index()] : T{0});
  __syncthreads();  // before the next call writes sums
  return value;
}

template <class T>
__device__ inline T block_max(T value) {
  __shared__ T maxima[kWarpSize];
  value = warp_max(value);
  if (lane_index() == 0) maxima[warp_index()] = value;
  __syncthreads();
  value = warp_max(maxima[lane_index() < num_warps() ? lane_index() : 0]);
  __syncthreads();  // before the next call writes maxima
  return value;
}

}  // namespace tandem::TANDEM_GPU
