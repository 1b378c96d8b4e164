// SPDX-License-Identifier: Apache-2.0
// Attention of one new token a row over a cache: a block for each (row, head). The cache is gone through in stretches of kStretch
// keys; a warp forms the score of one key, its lanes side by side in the key's channels.
#include <cmath>

#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/numbers.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256, kStretch = 256;

/// Threads that work on one channel of the output, each with a share of the keys.
__host__ __device__ inline int key_shares(int head_size) { return head_size >= kThreads ? 1 : kThreads / head_size; }

/// What one block works on.
template <class T>
struct Head {
  const T* query;
  T *keys, *values, *out;
  std::int64_t stride;  // elements between tokens of the caches
};

/// Scores of the stretch's keys become e^(score - largest); returns the factor for what was summed before.
template <class T>
__device__ Wide<T> stretch_powers(const DecodeWork& work, const Head<T>& head, const Wide<T>* query, std::int64_t first,
                                  int count, Wide<T>* powers, Wide<T>& largest, Wide<T>& sum) {
  using Real = Wide<T>;
  for (int k = warp_index(); k < count; k += num_warps()) {
    const T* key = head.keys + (first + k) * head.stride;
    Real score = 0;
    for (int c = lane_index(); c < work.head_size; c += kWarpSize) score += query[c] * to_wide(key[c]);
    score = warp_sum(score);
    if (lane_index() == 0) powers[k] = score * static_cast<Real>(work.scale);
  }
  __syncthreads();
  const int k = static_cast<int>(threadIdx.x);
  const Real before = largest;
  largest = larger(before, block_max(k < count ? powers[k] : -static_cast<Real>(INFINITY)));
  const Real power = k < count ? std::exp(powers[k] - largest) : Real(0), rescale = std::exp(before - largest);
  if (k < count) powers[k] = power;
  sum = sum * rescale + block_sum(power);  // its barriers also make the powers known to all
  return rescale;
}

template <class T>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeWork work) {
  static_assert(kStretch == kThreads);
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(Real, shared);
  const int size = work.head_size, shares = key_shares(size);
  Real *query = shared, *powers = query + size, *partial = powers + kStretch;  // partial [shares, head_size]
  const std::int64_t width = static_cast<std::int64_t>(work.heads) * size, row = blockIdx.y;
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * size, cache = row * work.capacity * width + channel;
  const T* token = static_cast<const T*>(work.qkv) + row * 3 * width + channel;
  const Head<T> head = {token, static_cast<T*>(work.key_cache) + cache, static_cast<T*>(work.value_cache) + cache,
                        static_cast<T*>(work.out) + row * width + channel, width};
  for (int c = static_cast<int>(threadIdx.x); c < size; c += kThreads) {
    query[c] = to_wide(token[c]);
    head.keys[work.length * width + c] = token[width + c];
    head.values[work.length * width + c] = token[2 * width + c];
  }
  for (int i = static_cast<int>(threadIdx.x); i < shares * size; i += kThreads) partial[i] = 0;
  __syncthreads();  // the new token is in the caches for the whole block

  Real largest = -static_cast<Real>(INFINITY), sum = 0;
  for (std::int64_t first = 0; first <= work.length; first += kStretch) {
    const std::int64_t left = work.length + 1 - first;
    const int count = left < kStretch ? static_cast<int>(left) : kStretch;
    const Real rescale = stretch_powers(work, head, query, first, count, powers, largest, sum);
    for (int i = static_cast<int>(threadIdx.x); i < shares * size; i += kThreads) {
      const T* values = head.values + first * width + i % size;
      Real total = 0;
      for (int k = i / size; k < count; k += shares) total += powers[k] * to_wide(values[k * width]);
      partial[i] = partial[i] * rescale + total;
    }
    __syncthreads();  // powers are done with
  }
  for (int c = static_cast<int>(threadIdx.x); c < size; c += kThreads) {
    Real total = 0;
    for (int share = 0; share < shares; ++share) total += partial[share * size + c];
    head.out[c] = from_wide<T>(total / sum);
  }
}

}  // namespace

void launch_attention_decode(const DecodeWork& work, StreamHandle stream) {
  with_storage(work.dtype, [&]<class T>(T) {
    const int numbers = work.head_size * (1 + key_shares(work.head_size)) + kStretch;
    launch(decode_kernel<T>, dim3(static_cast<unsigned>(work.heads), static_cast<unsigned>(work.rows)), dim3(kThreads),
           numbers * static_cast<int>(sizeof(Wide<T>)), stream, work);
  });
}

}  // namespace tandem::TANDEM_GPU
