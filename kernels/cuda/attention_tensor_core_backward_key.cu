// SPDX-License-Identifier: Apache-2.0
// The gradients of keys and values on tensor cores: a block works on 128 (head size up to 64) or 64 keys of one (row, head).
// Scores are formed transposed, S^T = K Q^T, so that their rows are the warp's keys and they are left operands of dV += P^T dO
// and dK += dS^T Q without leaving registers.
#include "kernels/cuda/attention_tensor_core_backward.cuh"

namespace tandem::TANDEM_GPU {
namespace {

template <class Tile>
constexpr int key_shared_bytes() {
  return Tile::kSharedBytes + 2 * Tile::kOthers * static_cast<int>(sizeof(QueryLine));
}

/// The warp's key, from 0, in row g (half 0) or g + 8 of a fragment: dealt so that a lane's keys are neighbours.
template <class Tile>
__device__ inline int key_of_row(int fragment, int half, int g) {
  return g * 2 * Tile::kFragments + 2 * fragment + half;
}

/// Bit of a lane's element of transposed scores of 16 queries.
template <class Tile>
__device__ constexpr int mask_bit(int fragment, int half, int block, int i) {
  return ((block * 2 + i) * Tile::kFragments + fragment) * 2 + half;
}
/// Which elements dropout keeps; as bits, so that they are drawn before the products take the registers. For each of a lane's
/// queries its 4 or 2 keys are in one Philox block where the row of the mask is aligned.
template <class Tile>
__device__ inline std::uint32_t kept_bits(const AttentionWork& work, std::uint64_t head_element, int first_query, int warp_key) {
  const int lane = static_cast<int>(threadIdx.x) % 32, first = key_of_row<Tile>(0, 0, lane / 4);
  std::uint32_t bits = 0;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first_query + 8 * block + lane % 4 * 2 + i;
      const FourWords words = four_words(
          work.dropout, head_element + static_cast<std::uint64_t>(query) * work.dropout.side + warp_key + first / 4 * 4);
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t low = words.word[2 * f + half], high = words.word[2 + half];
          const std::uint32_t word = Tile::kFragments == 1 && first % 4 != 0 ? high : low;
          bits |= static_cast<std::uint32_t>(word >= work.dropout.threshold) << mask_bit<Tile>(f, half, block, i);
        }
      }
    }
  }
  return bits;
}

/// Transposed scores of 16 queries become P, dropped but not scaled, and dprobabilities become dS.
template <class Tile, bool kDropout>
__device__ inline void form_gradients(Products<Tile>& scores, Products<Tile>& dprobabilities, const AttentionWork& work,
                                      const QueryLine* lines, std::uint32_t kept, int warp_key, bool all_seen) {
  const float scale_log2 = static_cast<float>(work.scale) * kLog2E, keep_scale = static_cast<float>(work.dropout.keep_scale);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const QueryLine line = lines[8 * block + lane % 4 * 2 + i];
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = warp_key + key_of_row<Tile>(f, half, lane / 4);
          const bool seen = all_seen || (key >= line.seen_begin && key < line.seen_end);
          float &score = scores[f][block][2 * half + i], &gradient = dprobabilities[f][block][2 * half + i];
          const float p = seen ? exp2_fast(fmaf(score, scale_log2, -line.logsumexp2)) : 0.0F;
          score = p;
          if constexpr (kDropout) {
            const bool keeps = (kept >> mask_bit<Tile>(f, half, block, i) & 1) != 0;
            score = keeps ? p : 0.0F;
            gradient = keeps ? gradient * keep_scale : 0.0F;
          }
          gradient = seen ? p * (gradient - line.dot) : 0.0F;
        }
      }
    }
  }
}

/// The next tile of queries at or after `first_query` of which one sees a key in [first_key, + kRows); work.queries: none.
template <class Tile>
__device__ inline int next_tile(const AttentionWork& work, int row, int first_query, int first_key) {
  for (; first_query < work.queries; first_query += Tile::kOthers) {
    const SeenKeys sees = tile_sight(work, row, first_query, Tile::kOthers).some;
    if (sees.begin < first_key + Tile::kRows && sees.end > first_key) return first_query;
  }
  return work.queries;
}

template <class T, class Tile>
__device__ inline void store_keys(const AttentionWork& work, int row, int head, int warp_key, const RowSums<Tile>& dkey,
                                  const RowSums<Tile>& dvalue) {
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = warp_key + key_of_row<Tile>(f, half, static_cast<int>(threadIdx.x) % 32 / 4);
      if (to >= work.keys) continue;
      store_sums<T>(work, work.dkey, row, head, to, dkey[f], half, static_cast<float>(work.scale), 1.0F);
      store_sums<T>(work, work.dvalue, row, head, to, dvalue[f], half, static_cast<float>(work.dropout.keep_scale), 1.0F);
    }
  }
}

template <class T, class Tile, bool kDropout>
__global__ void __launch_bounds__(kBackwardThreads, 2) key_kernel(const AttentionWork work) {
  GPU_DYNAMIC_SHARED(std::uint16_t, shared);
  std::uint16_t* const buffers = shared + 2 * Tile::kRowElements;                        // [2][queries, dout]
  auto* const lines = reinterpret_cast<QueryLine*>(buffers + 4 * Tile::kOtherElements);  // [2][kOthers]
  const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z), thread = static_cast<int>(threadIdx.x);
  const int first_key = static_cast<int>(blockIdx.x) * Tile::kRows, warp_row = thread / 32 * Tile::kWarpRows;
  const int warp_key = first_key + warp_row;
  const QueryLine* const head_lines = static_cast<const QueryLine*>(work.query_lines) + line_index(work, row, head, 0);
  const auto load_queries = [&](int first_query, int buffer) {
    load_others<Tile>(buffers + buffer * 2 * Tile::kOtherElements, work, work.query, work.dout, row, head, first_query,
                      work.queries);
    if (thread < Tile::kOthers) copy_async_16(lines + buffer * Tile::kOthers + thread, head_lines + first_query + thread);
    copy_async_commit();
  };
  const int begin = next_tile<Tile>(work, row, larger(first_key - work.key_offset, 0) / Tile::kOthers * Tile::kOthers, first_key);
  if (begin >= work.queries && work.accumulate) return;
  if (begin < work.queries) {  // no block ends with copies under way
    load_tile<Tile::kRows, Tile::kHead, kBackwardThreads>(shared, work, work.key, row, head, first_key, work.keys);
    load_tile<Tile::kRows, Tile::kHead, kBackwardThreads>(shared + Tile::kRowElements, work, work.value, row, head, first_key,
                                                          work.keys);
    load_queries(begin, 0);
  }

  WarpRows<Tile> key, value;
  RowSums<Tile> dkey = {}, dvalue = {};
  const std::uint64_t head_element = kDropout ? first_mask_element(work, row, head) : 0;
  int buffer = 0;
  for (int first_query = begin, next = 0; first_query < work.queries; first_query = next, buffer ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is there for all, and nobody still reads the buffer that the next one goes to
    if (first_query == begin) {
      const int lane_row = warp_row + key_of_row<Tile>(0, thread / 8 % 2, thread % 8);
      load_warp_rows<Tile>(key, shared, lane_row, 2);
      load_warp_rows<Tile>(value, shared + Tile::kRowElements, lane_row, 2);
    }
    next = next_tile<Tile>(work, row, first_query + Tile::kOthers, first_key);
    if (next < work.queries) load_queries(next, buffer ^ 1);
    const std::uint16_t *queries = buffers + buffer * 2 * Tile::kOtherElements, *douts = queries + Tile::kOtherElements;
    // The keys of the warp are all seen from one query on, unless documents of the tile begin beyond the first of them.
    const bool may_see_all =
        warp_key >= tile_sight(work, row, first_query, Tile::kOthers).all.begin && warp_key + Tile::kWarpRows <= work.keys;
    const int all_from = may_see_all ? warp_key + Tile::kWarpRows - 1 - work.key_offset : work.queries;
#pragma unroll 1
    for (int part = 0; part < Tile::kOthers; part += 16) {
      // Not one of these 16 queries has come to the warp's keys.
      if (first_query + part + 15 + work.key_offset < warp_key || first_query + part >= work.queries) continue;
      // Queries beyond the last are rows of zeros, and so are their lines: they add nothing.
      const bool all_seen = first_query + part >= all_from;
      const std::uint32_t kept = kDropout ? kept_bits<Tile>(work, head_element, first_query + part, warp_key) : 0;
      Products<Tile> scores, gradients;
      multiply_others<T, Tile, Order::natural>(scores, key, queries, part);
      multiply_others<T, Tile, Order::natural>(gradients, value, douts, part);
      form_gradients<Tile, kDropout>(scores, gradients, work, lines + buffer * Tile::kOthers + part, kept, warp_key, all_seen);
      add_others<T, Tile, Order::natural>(dvalue, scores, douts, part);
      add_others<T, Tile, Order::natural>(dkey, gradients, queries, part);
    }
  }
  store_keys<T, Tile>(work, row, head, warp_key, dkey, dvalue);
}

template <class T, int kHead>
void launch_head(const AttentionWork& work, StreamHandle stream) {
  using Tile = BackwardTiling<kHead>;
  const dim3 grid = tile_grid(work, work.keys, Tile::kRows);
  if (work.dropout.row_ids != nullptr) {
    launch(key_kernel<T, Tile, true>, grid, dim3(kBackwardThreads), key_shared_bytes<Tile>(), stream, work);
  } else {
    launch(key_kernel<T, Tile, false>, grid, dim3(kBackwardThreads), key_shared_bytes<Tile>(), stream, work);
  }
}

}  // namespace

void launch_attention_key_gradients_tensor_core(const AttentionWork& work, StreamHandle stream) {
  const auto run = [&]<class T>(T) {
    work.head_size <= 64 ? launch_head<T, 64>(work, stream) : launch_head<T, 128>(work, stream);
  };
  work.dtype == DType::bf16 ? run(bf16{}) : run(f16{});
}

}  // namespace tandem::TANDEM_GPU
