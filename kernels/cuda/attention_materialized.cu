// SPDX-License-Identifier: Apache-2.0
// Attention that keeps its probabilities, in the arithmetic of the wide type. Forward goes through the keys twice: for the
// statistics of softmax, then for the probabilities, which are stored and used as they were stored. Backward is that of
// attention_backward.cu.
#include "kernels/cuda/attention_plain.cuh"

namespace tandem::TANDEM_GPU {
namespace {

/// A tile's scores join largest and sum of each row; kTile / 4 threads share one.
template <class Real, int kTile>
__device__ void add_statistics(const Real* strip, Real* largest, Real* sum) {
  constexpr int kShare = kTile / 4;
  const int r = static_cast<int>(threadIdx.x) / kShare, part = static_cast<int>(threadIdx.x) % kShare;
  const Real* scores = strip + r * (kTile + 1);
  const Real before = largest[r];
  Real most = before;
  for (int k = part; k < kTile; k += kShare) most = larger_of(scores[k], most);
  most = reduce_row<kTile>(most, [](Real a, Real b) { return larger_of(a, b); });
  const Real origin = most == -static_cast<Real>(INFINITY) ? Real(0) : most;
  Real powers = 0;
  for (int k = part; k < kTile; k += kShare) powers += std::exp(scores[k] - origin);
  powers = reduce_row<kTile>(powers, [](Real a, Real b) { return a + b; });
  if (part != 0) return;
  sum[r] = sum[r] * std::exp(before - origin) + powers;
  largest[r] = most;
}

/// Scores become probabilities, which are stored; the strip has them as they were stored, dropped.
template <class T, int kTile>
__device__ void keep_tile(Wide<T>* strip, const AttentionWork& work, const Wide<T>* largest, const Wide<T>* sum,
                          std::uint64_t head_element, int row, int head, int first_query, int first_key) {
  using Real = Wide<T>;
  const PlainBlock<kTile> at;
  for (int y = at.y; y < kTile && first_query + y < work.queries; y += at.kHalf) {
    for (int x = at.x; x < kTile; x += at.kHalf) {
      Real& score = strip[y * (kTile + 1) + x];
      if (first_key + x >= work.keys) {
        score = 0;
        continue;
      }
      const T kept = from_wide<T>(std::exp(score - largest[y]) / sum[y]);
      static_cast<T*>(work.probabilities)[kept_index(work, row, head, first_query + y, first_key + x)] = kept;
      score = to_wide(kept) * mask_factor<Real>(work, head_element, first_query + y, first_key + x);
    }
  }
}

template <class T, int kTile>
__device__ void keep_zeros(const AttentionWork& work, int row, int head, int first_query, int first_key) {
  const PlainBlock<kTile> at;
  for (int y = at.y; y < kTile && first_query + y < work.queries; y += at.kHalf) {
    for (int x = at.x; x < kTile && first_key + x < work.keys; x += at.kHalf) {
      static_cast<T*>(work.probabilities)[kept_index(work, row, head, first_query + y, first_key + x)] = from_wide<T>(0);
    }
  }
}

template <class T, int kTile>
__global__ void __launch_bounds__(PlainBlock<kTile>::kThreads) forward_kernel(const AttentionWork work) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(Real, memory);
  const int tile = kTile * tile_stride(work.head_size);
  Real *query = memory, *keys = query + tile, *out = keys + tile, *strip = out + tile;
  Real *largest = strip + PlainBlock<kTile>::kStrip, *sum = largest + kTile;
  const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTile;
  const SeenKeys sees = tile_sight(work, row, first_query, kTile).some;
  const std::uint64_t head_element = first_mask_element(work, row, head);
  load_rows<T, kTile>(query, work, work.query, row, head, first_query, work.queries);
  clear_rows<Real, kTile>(out, work.head_size);
  if (threadIdx.x < kTile) {
    largest[threadIdx.x] = -static_cast<Real>(INFINITY);
    sum[threadIdx.x] = 0;
  }
  const int begin = sees.begin / kTile * kTile;
  for (int first_key = begin; first_key < sees.end; first_key += kTile) {
    __syncthreads();
    load_rows<T, kTile>(keys, work, work.key, row, head, first_key, work.keys);
    __syncthreads();
    score_strip<Real, kTile>(strip, work, query, keys, row, first_query, first_key);
    __syncthreads();
    add_statistics<Real, kTile>(strip, largest, sum);
  }
  for (int first_key = 0; first_key < work.keys; first_key += kTile) {
    if (first_key < begin || first_key >= sees.end) {
      keep_zeros<T, kTile>(work, row, head, first_query, first_key);
      continue;
    }
    __syncthreads();
    load_rows<T, kTile>(keys, work, work.key, row, head, first_key, work.keys);
    __syncthreads();
    score_strip<Real, kTile>(strip, work, query, keys, row, first_query, first_key);
    __syncthreads();  // scores are there, keys are done with
    load_rows<T, kTile>(keys, work, work.value, row, head, first_key, work.keys);
    keep_tile<T, kTile>(strip, work, largest, sum, head_element, row, head, first_query, first_key);
    __syncthreads();
    add_rows<Strip::plain, Real, kTile>(out, nullptr, strip, keys, work.head_size);
  }
  __syncthreads();
  store_rows<T, kTile>(out, work, work.out, row, head, first_query, work.queries, Real(1));
}

/// row_dots = sum over keys of P dP.
template <class T, int kTile>
__global__ void __launch_bounds__(PlainBlock<kTile>::kThreads) row_dots_kernel(const AttentionWork work) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(Real, memory);
  const int tile = kTile * tile_stride(work.head_size);
  Real *dout = memory, *values = dout + tile, *strip = values + tile;
  const PlainBlock<kTile> at;
  const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTile;
  const SeenKeys sees = tile_sight(work, row, first_query, kTile).some;
  const std::uint64_t head_element = first_mask_element(work, row, head);
  load_rows<T, kTile>(dout, work, work.dout, row, head, first_query, work.queries);
  Real own[2] = {0, 0};  // this thread's columns of its two rows
  for (int first_key = sees.begin / kTile * kTile; first_key < sees.end; first_key += kTile) {
    __syncthreads();
    load_rows<T, kTile>(values, work, work.value, row, head, first_key, work.keys);
    __syncthreads();
    Real sums[2][2];
    multiply_rows<Real, kTile>(sums, dout, values, work.head_size);
    for (int i = 0; i < 2; ++i) {
      const int q = first_query + at.y + i * at.kHalf;
      const SeenKeys seen = seen_keys(work, row, q);
      for (int j = 0; j < 2; ++j) {
        const int k = first_key + at.x + j * at.kHalf;
        if (!seen.has(k)) continue;
        const Real p = to_wide(static_cast<const T*>(work.probabilities)[kept_index(work, row, head, q, k)]);
        own[i] += p * sums[i][j] * mask_factor<Real>(work, head_element, q, k);
      }
    }
  }
  for (int i = 0; i < 2; ++i) strip[(at.y + i * at.kHalf) * (kTile + 1) + at.x] = own[i];
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kTile || first_query + r >= work.queries) return;
  Real sum = 0;
  for (int x = 0; x < at.kHalf; ++x) sum += strip[r * (kTile + 1) + x];
  static_cast<Real*>(work.row_dots)[statistic_index(work, row, head, first_query + r)] = sum;
}

}  // namespace

void launch_attention_materialized_forward(const AttentionWork& work, StreamHandle stream) {
  with_storage(work.dtype, [&]<class T>(T) {
    with_plain_tile<Wide<T>>(work, 3, 1, 2, [&](auto size, int bytes) {
      constexpr int kTile = decltype(size)::value;
      const dim3 grid = tile_grid(work, work.queries, kTile);
      launch(forward_kernel<T, kTile>, grid, dim3(PlainBlock<kTile>::kThreads), bytes, stream, work);
    });
  });
}

void launch_attention_materialized_row_dots(const AttentionWork& work, StreamHandle stream) {
  with_storage(work.dtype, [&]<class T>(T) {
    with_plain_tile<Wide<T>>(work, 2, 1, 0, [&](auto size, int bytes) {
      constexpr int kTile = decltype(size)::value;
      const dim3 grid = tile_grid(work, work.queries, kTile);
      launch(row_dots_kernel<T, kTile>, grid, dim3(PlainBlock<kTile>::kThreads), bytes, stream, work);
    });
  });
}

}  // namespace tandem::TANDEM_GPU
