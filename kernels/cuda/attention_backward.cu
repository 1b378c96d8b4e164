// SPDX-License-Identifier: Apache-2.0
// Attention of any dtype and head size, backward, without atomic sums: one kernel makes the gradients of keys and values, a block
// for a tile of keys which goes through the queries; another that of queries, a block for a tile of queries which goes through
// the keys. Both form the probabilities P again, or read those kept, and
//   dP = (dO V^T) mask / (1 - p);   dS = P (dP - D);   D = rowsum(dO O) = rowsum(P dP)
#include "kernels/cuda/attention_plain.cuh"
#include "kernels/cuda/block.cuh"

namespace tandem::TANDEM_GPU {
namespace {

/// One warp for each (row, head, query).
template <class T>
__global__ void row_dots_kernel(const AttentionWork work) {
  using Real = Wide<T>;
  const std::int64_t count = static_cast<std::int64_t>(work.rows) * work.heads * work.queries;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= count) return;
  const int query = static_cast<int>(index % work.queries), head = static_cast<int>(index / work.queries % work.heads);
  const int row = static_cast<int>(index / work.queries / work.heads);
  const T* dout = operand_at<const T>(work, work.dout, row, head, query);
  const std::int64_t at = operand_index(work, work.out, row, head, query);
  const bool wide_out = work.accumulate && work.sums == DType::f32;
  Real sum = 0;
  for (int c = static_cast<int>(threadIdx.x) % 32; c < work.head_size; c += 32) {
    const Real out = wide_out ? static_cast<Real>(static_cast<const float*>(work.out.data)[at + c])
                              : to_wide(static_cast<const T*>(work.out.data)[at + c]);
    sum += to_wide(dout[c]) * out;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) static_cast<Real*>(work.row_dots)[index] = sum;
}

/// This thread's probabilities P, before dropout, and dS of one tile of queries and one of keys.
template <class Real>
struct Gradients {
  Real dropped[2][2], score[2][2];
};
template <class T, int kTile>
__device__ Gradients<Wide<T>> form_gradients(const AttentionWork& work, int row, int head, std::uint64_t head_element,
                                             int first_query, int first_key, const Wide<T>* query, const Wide<T>* keys,
                                             const Wide<T>* dout, const Wide<T>* values) {
  using Real = Wide<T>;
  const PlainBlock<kTile> at;
  Gradients<Real> result;
  Real scores[2][2], dprobabilities[2][2];
  if (work.probabilities == nullptr) multiply_rows<Real, kTile>(scores, query, keys, work.head_size);
  multiply_rows<Real, kTile>(dprobabilities, dout, values, work.head_size);
  for (int i = 0; i < 2; ++i) {
    const int q = first_query + at.y + i * at.kHalf;
    const SeenKeys seen = seen_keys(work, row, q);
    for (int j = 0; j < 2; ++j) {
      const int k = first_key + at.x + j * at.kHalf;
      result.dropped[i][j] = result.score[i][j] = 0;
      if (!seen.has(k)) continue;
      const std::int64_t statistic = statistic_index(work, row, head, q);
      const Real p =
          work.probabilities == nullptr
              ? std::exp(scores[i][j] * static_cast<Real>(work.scale) - static_cast<const Real*>(work.logsumexp)[statistic])
              : to_wide(static_cast<const T*>(work.probabilities)[kept_index(work, row, head, q, k)]);
      const Real factor = mask_factor<Real>(work, head_element, q, k);
      result.dropped[i][j] = p * factor;
      result.score[i][j] = p * (dprobabilities[i][j] * factor - static_cast<const Real*>(work.row_dots)[statistic]);
    }
  }
  return result;
}
template <class Real, int kTile>
__device__ void put_strip(Real* strip, const Real (&values)[2][2]) {
  const PlainBlock<kTile> at;
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) strip[(at.y + i * at.kHalf) * (kTile + 1) + at.x + j * at.kHalf] = values[i][j];
  }
}

template <class T, int kTile>
__global__ void __launch_bounds__(PlainBlock<kTile>::kThreads) query_kernel(const AttentionWork work) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(Real, memory);
  const int tile = kTile * tile_stride(work.head_size);
  Real *query = memory, *dout = query + tile, *keys = dout + tile, *values = keys + tile, *dquery = values + tile;
  Real* strip = dquery + tile;
  const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTile;
  const SeenKeys sees = tile_sight(work, row, first_query, kTile).some;
  if (sees.begin >= sees.end && work.accumulate) return;
  const std::uint64_t head_element = first_mask_element(work, row, head);
  load_rows<T, kTile>(query, work, work.query, row, head, first_query, work.queries);
  load_rows<T, kTile>(dout, work, work.dout, row, head, first_query, work.queries);
  clear_rows<Real, kTile>(dquery, work.head_size);
  for (int first_key = sees.begin / kTile * kTile; first_key < sees.end; first_key += kTile) {
    __syncthreads();
    load_rows<T, kTile>(keys, work, work.key, row, head, first_key, work.keys);
    load_rows<T, kTile>(values, work, work.value, row, head, first_key, work.keys);
    __syncthreads();
    put_strip<Real, kTile>(
        strip, form_gradients<T, kTile>(work, row, head, head_element, first_query, first_key, query, keys, dout, values).score);
    __syncthreads();
    add_rows<Strip::plain, Real, kTile>(dquery, nullptr, strip, keys, work.head_size);
  }
  __syncthreads();
  store_rows<T, kTile>(dquery, work, work.dquery, row, head, first_query, work.queries, static_cast<Real>(work.scale));
}

template <class T, int kTile>
__global__ void __launch_bounds__(PlainBlock<kTile>::kThreads) key_kernel(const AttentionWork work) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(Real, memory);
  const int tile = kTile * tile_stride(work.head_size);
  Real *keys = memory, *values = keys + tile, *query = values + tile, *dout = query + tile, *dkeys = dout + tile,
       *dvalues = dkeys + tile;
  Real *dropped = dvalues + tile, *dscores = dropped + PlainBlock<kTile>::kStrip;
  const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z),
            first_key = static_cast<int>(blockIdx.x) * kTile;
  const std::uint64_t head_element = first_mask_element(work, row, head);
  load_rows<T, kTile>(keys, work, work.key, row, head, first_key, work.keys);
  load_rows<T, kTile>(values, work, work.value, row, head, first_key, work.keys);
  clear_rows<Real, kTile>(dkeys, work.head_size);
  clear_rows<Real, kTile>(dvalues, work.head_size);
  for (int first_query = larger(first_key - work.key_offset, 0) / kTile * kTile; first_query < work.queries;
       first_query += kTile) {
    const SeenKeys sees = tile_sight(work, row, first_query, kTile).some;
    if (sees.begin >= first_key + kTile || sees.end <= first_key) continue;
    __syncthreads();
    load_rows<T, kTile>(query, work, work.query, row, head, first_query, work.queries);
    load_rows<T, kTile>(dout, work, work.dout, row, head, first_query, work.queries);
    __syncthreads();
    const Gradients<Real> gradients =
        form_gradients<T, kTile>(work, row, head, head_element, first_query, first_key, query, keys, dout, values);
    put_strip<Real, kTile>(dropped, gradients.dropped);
    put_strip<Real, kTile>(dscores, gradients.score);
    __syncthreads();
    add_rows<Strip::transposed, Real, kTile>(dvalues, nullptr, dropped, dout, work.head_size);
    add_rows<Strip::transposed, Real, kTile>(dkeys, nullptr, dscores, query, work.head_size);
  }
  __syncthreads();
  store_rows<T, kTile>(dkeys, work, work.dkey, row, head, first_key, work.keys, static_cast<Real>(work.scale));
  store_rows<T, kTile>(dvalues, work, work.dvalue, row, head, first_key, work.keys, Real(1));
}

}  // namespace

void launch_attention_row_dots(const AttentionWork& work, StreamHandle stream) {
  constexpr int kWarps = 8;
  const std::int64_t count = static_cast<std::int64_t>(work.rows) * work.heads * work.queries;
  with_storage(work.dtype, [&]<class T>(T) {
    launch(row_dots_kernel<T>, dim3(static_cast<unsigned>((count + kWarps - 1) / kWarps)), dim3(32 * kWarps), 0, stream, work);
  });
}

void launch_attention_backward(const AttentionWork& work, StreamHandle stream) {
  with_storage(work.dtype, [&]<class T>(T) {
    with_plain_tile<Wide<T>>(work, 6, 2, 0, [&](auto size, int bytes) {
      constexpr int kTile = decltype(size)::value;
      const dim3 grid = tile_grid(work, work.keys, kTile);
      launch(key_kernel<T, kTile>, grid, dim3(PlainBlock<kTile>::kThreads), bytes, stream, work);
    });
    with_plain_tile<Wide<T>>(work, 5, 1, 0, [&](auto size, int bytes) {
      constexpr int kTile = decltype(size)::value;
      const dim3 grid = tile_grid(work, work.queries, kTile);
      launch(query_kernel<T, kTile>, grid, dim3(PlainBlock<kTile>::kThreads), bytes, stream, work);
    });
  });
}

}  // namespace tandem::TANDEM_GPU
