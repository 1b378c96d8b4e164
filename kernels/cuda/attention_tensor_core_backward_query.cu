// SPDX-License-Identifier: Apache-2.0
// The gradient of queries on tensor cores: a block works on 128 (head size up to 64) or 64 queries of one (row, head).
#include "kernels/cuda/attention_tensor_core_backward.cuh"

namespace tandem::TANDEM_GPU {
namespace {

/// Of each row (fragment, half) of a warp.
template <class Tile>
struct QueryStatistics {
  float logsumexp2[Tile::kFragments][2], dot[Tile::kFragments][2];  // in powers of two; D
};

template <class Tile>
__device__ inline void load_statistics(QueryStatistics<Tile>& statistics, const AttentionWork& work, int row, int head,
                                       int first_query) {
  const QueryLine* lines = static_cast<const QueryLine*>(work.query_lines) + line_index(work, row, head, 0);
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + 16 * f + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
      const QueryLine line = query < work.queries ? lines[query] : QueryLine{0, 0, 0, 0};
      statistics.logsumexp2[f][half] = line.logsumexp2;
      statistics.dot[f][half] = line.dot;
    }
  }
}

/// What dropout leaves of the gradients of 16 dropped probabilities, not scaled.
template <class Tile>
__device__ inline void drop_gradients(Products<Tile>& gradients, const AttentionWork& work, std::uint64_t head_element,
                                      int first_query, int first_key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + 16 * f + 8 * half + lane / 4;
      const std::uint64_t element =
          head_element + static_cast<std::uint64_t>(query) * work.dropout.side + first_key + lane % 4 * 4;
      drop_four(gradients[f][0], gradients[f][1], half, four_words(work.dropout, element), work.dropout.threshold);
    }
  }
}

/// dprobabilities become dS = P (dP - D), for 16 keys from `first_key` on; 0 where a query does not see the key, which may be
/// unless kAllSeen. Selects, not branches: behind a branch each, the exponentials would be waited for one by one.
template <class Tile, bool kDropout, bool kAllSeen>
__device__ inline void form_dscores(Products<Tile>& dprobabilities, const Products<Tile>& scores, const AttentionWork& work,
                                    int row, const QueryStatistics<Tile>& statistics, int first_query, int first_key) {
  const float scale_log2 = static_cast<float>(work.scale) * kLog2E, keep_scale = static_cast<float>(work.dropout.keep_scale);
  const int lane = static_cast<int>(threadIdx.x) % 32, lane_key = first_key + lane % 4 * 4;
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SeenKeys seen = {0, 0};
      if constexpr (!kAllSeen) seen = seen_keys(work, row, first_query + 16 * f + 8 * half + lane / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& gradient = dprobabilities[f][i / 2][2 * half + i % 2];
        const float p = exp2_fast(fmaf(scores[f][i / 2][2 * half + i % 2], scale_log2, -statistics.logsumexp2[f][half]));
        const float dp = kDropout ? gradient * keep_scale : gradient;
        gradient = p * (dp - statistics.dot[f][half]);
        if constexpr (!kAllSeen) gradient = seen.has(lane_key + i) ? gradient : 0.0F;
      }
    }
  }
}

template <class T, class Tile>
__device__ inline void store_queries(const AttentionWork& work, int row, int head, int warp_query, const RowSums<Tile>& dquery) {
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = warp_query + 16 * f + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
      if (to < work.queries) {
        store_sums<T>(work, work.dquery, row, head, to, dquery[f], half, static_cast<float>(work.scale), 1.0F);
      }
    }
  }
}

template <class T, class Tile, bool kDropout>
__global__ void __launch_bounds__(kBackwardThreads, 2) query_kernel(const AttentionWork work) {
  GPU_DYNAMIC_SHARED(std::uint16_t, shared);
  std::uint16_t* const buffers = shared + 2 * Tile::kRowElements;  // [2][keys, values]
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x), head = static_cast<int>(blockIdx.y),
            row = static_cast<int>(blockIdx.z);
  const int first_query = tile * Tile::kRows, warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
  const int warp_query = first_query + warp_row;
  const TileSight block_sees = tile_sight(work, row, first_query, Tile::kRows);
  const int begin = block_sees.some.begin / Tile::kOthers * Tile::kOthers, end = block_sees.some.end;
  if (begin >= end && work.accumulate) return;
  const auto load_keys = [&](int first_key, int buffer) {
    load_others<Tile>(buffers + buffer * 2 * Tile::kOtherElements, work, work.key, work.value, row, head, first_key, work.keys);
    copy_async_commit();
  };
  load_tile<Tile::kRows, Tile::kHead, kBackwardThreads>(shared, work, work.query, row, head, first_query, work.queries);
  load_tile<Tile::kRows, Tile::kHead, kBackwardThreads>(shared + Tile::kRowElements, work, work.dout, row, head, first_query,
                                                        work.queries);
  load_keys(begin, 0);

  const bool warp_works = warp_query < work.queries;
  const TileSight warp_sees = tile_sight(work, row, warp_works ? warp_query : first_query, Tile::kWarpRows);
  QueryStatistics<Tile> statistics;
  load_statistics<Tile>(statistics, work, row, head, warp_query);
  WarpRows<Tile> query, dout;
  RowSums<Tile> dquery;
  clear_sums<Tile>(dquery);
  const std::uint64_t head_element = kDropout ? first_mask_element(work, row, head) : 0;

  int buffer = 0;
  for (int first_key = begin; first_key < end; first_key += Tile::kOthers, buffer ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is there for all, and nobody still reads the buffer that the next one goes to
    if (first_key == begin) {
      const int lane_row = warp_row + static_cast<int>(threadIdx.x) % 16;
      load_warp_rows<Tile>(query, shared, lane_row, 16);
      load_warp_rows<Tile>(dout, shared + Tile::kRowElements, lane_row, 16);
    }
    if (first_key + Tile::kOthers < end) load_keys(first_key + Tile::kOthers, buffer ^ 1);
    if (!warp_works) continue;
    const std::uint16_t *keys = buffers + buffer * 2 * Tile::kOtherElements, *values = keys + Tile::kOtherElements;
#pragma unroll 1
    for (int part = 0; part < Tile::kOthers; part += 16) {
      const int from = first_key + part;
      if (from >= warp_sees.some.end || from + 16 <= warp_sees.some.begin) continue;
      Products<Tile> scores, gradients;
      multiply_others<T, Tile, Order::fours>(scores, query, keys, part);
      multiply_others<T, Tile, Order::fours>(gradients, dout, values, part);
      const bool all_seen = from >= warp_sees.all.begin && from + 16 <= warp_sees.all.end;
      if constexpr (kDropout) drop_gradients<Tile>(gradients, work, head_element, warp_query, from);
      if (all_seen) {
        form_dscores<Tile, kDropout, true>(gradients, scores, work, row, statistics, warp_query, from);
      } else {
        form_dscores<Tile, kDropout, false>(gradients, scores, work, row, statistics, warp_query, from);
      }
      add_others<T, Tile, Order::fours>(dquery, gradients, keys, part);
    }
  }
  if (warp_works) store_queries<T, Tile>(work, row, head, warp_query, dquery);
}

template <class T, int kHead>
void launch_head(const AttentionWork& work, StreamHandle stream) {
  using Tile = BackwardTiling<kHead>;
  const dim3 grid = tile_grid(work, work.queries, Tile::kRows);
  if (work.dropout.row_ids != nullptr) {
    launch(query_kernel<T, Tile, true>, grid, dim3(kBackwardThreads), Tile::kSharedBytes, stream, work);
  } else {
    launch(query_kernel<T, Tile, false>, grid, dim3(kBackwardThreads), Tile::kSharedBytes, stream, work);
  }
}

}  // namespace

void launch_attention_query_gradient_tensor_core(const AttentionWork& work, StreamHandle stream) {
  const auto run = [&]<class T>(T) {
    work.head_size <= 64 ? launch_head<T, 64>(work, stream) : launch_head<T, 128>(work, stream);
  };
  work.dtype == DType::bf16 ? run(bf16{}) : run(f16{});
}

}  // namespace tandem::TANDEM_GPU
