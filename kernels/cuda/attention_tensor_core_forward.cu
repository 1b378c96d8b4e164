// SPDX-License-Identifier: Apache-2.0
// Flash attention (Dao 2023, "FlashAttention-2") on tensor cores, forward. A block works on 128 queries of one (row, head), a
// warp on 32 of them, in two fragments of 16 rows, so that each fragment of keys and values read from shared memory serves two
// products. Keys and values come in tiles, the next one on its way while one is worked on. Scores, probabilities and sums stay in
// registers.
#include "kernels/cuda/attention_tile.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 128, kFragments = 2, kWarpRows = 16 * kFragments, kQueries = kThreads;

/// 64 keys in a tile where registers hold their scores beside the output of 64 channels, else 32.
template <int kChannels, int kTileKeys>
struct Tiling {
  static constexpr int kHead = kChannels, kKeys = kTileKeys;
  static constexpr int kSteps = kHead / 16, kBlocks = kHead / 8;  // depth of q.k, columns of the output
  static constexpr int kQueryElements = kQueries * kHead, kKeyElements = kKeys * kHead;
  static constexpr int kSharedBytes = 2 * (kQueryElements + 4 * kKeyElements);
  static constexpr bool kQueryInRegisters = kHead <= 64;  // beyond, registers do not hold it beside the output
};

template <class Tile>
using Scores = Sums<Tile::kKeys / 8>[kFragments];

/// A warp's queries, as fragments or as rows of shared memory.
template <class Tile>
class WarpQuery {
 public:
  __device__ explicit WarpQuery(const std::uint16_t* tile)
      : tile_(tile), row_(static_cast<int>(threadIdx.x) / 32 * kWarpRows + static_cast<int>(threadIdx.x) % 16) {}
  __device__ void load() {
    if constexpr (Tile::kQueryInRegisters) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int step = 0; step < Tile::kSteps; ++step)
          load_left<Tile::kHead>(kept_[f][step], tile_ + 16 * f * Tile::kHead, row_, step);
      }
    }
  }
  __device__ void get(int f, int step, Fragment& fragment) const {
    if constexpr (Tile::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] = kept_[f][step][i];
    } else {
      load_left<Tile::kHead>(fragment, tile_ + 16 * f * Tile::kHead, row_, step);
    }
  }

 private:
  const std::uint16_t* tile_;
  int row_;
  Fragment kept_[kFragments][Tile::kQueryInRegisters ? Tile::kSteps : 1];
};

template <class T, class Tile>
__device__ inline void score_tile(Scores<Tile>& scores, const WarpQuery<Tile>& query, const std::uint16_t* keys) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) set_zero(scores[f]);
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    Fragment left[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) query.get(f, step, left[f]);
#pragma unroll
    for (int pair = 0; pair < Tile::kKeys / 16; ++pair) {
      Fragment right;
      load_right_transposed<Tile::kHead, Order::fours>(right, keys, 16 * pair, step);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) multiply_pair<T>(scores[f][2 * pair], scores[f][2 * pair + 1], left[f], right);
    }
  }
}

/// Scores of keys that a query does not see become -infinity.
template <class Tile>
__device__ inline void hide_unseen(Scores<Tile>& scores, const AttentionWork& work, int row, int first_query, int first_key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SeenKeys seen = seen_keys(work, row, first_query + 16 * f + 8 * half + lane / 4);
#pragma unroll
      for (int block = 0; block < Tile::kKeys / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + block / 2 * 16 + lane % 4 * 4 + block % 2 * 2 + i;
          if (!seen.has(key)) scores[f][block][2 * half + i] = -INFINITY;
        }
      }
    }
  }
}

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFU, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFFU, value, 2));
}
__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(0xFFFFFFFFU, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFFU, value, 2);
}

/// What a warp carries from tile to tile: of each row (fragment, half) the largest score so far, this lane's part of the sum of
/// e^(score - largest), and the output before it is divided by that sum.
template <class Tile>
struct WarpState {
  Sums<Tile::kBlocks> out[kFragments];
  float largest[kFragments][2], sum[kFragments][2];
};

/// Scores become e^(score - largest), and what was summed so far is rescaled to the new largest.
template <class Tile>
__device__ inline void softmax_tile(Scores<Tile>& scores, WarpState<Tile>& state, float scale_log2) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = state.largest[f][half];
#pragma unroll
      for (int block = 0; block < Tile::kKeys / 8; ++block) {
        largest = fmaxf(largest, fmaxf(scores[f][block][2 * half], scores[f][block][2 * half + 1]));
      }
      largest = quad_max(largest);
      // Of a row that has seen no key yet: any finite number makes all its powers 0.
      const float origin = largest == -INFINITY ? 0.0F : largest * scale_log2;
      const float rescale = exp2_fast(state.largest[f][half] * scale_log2 - origin);
      state.largest[f][half] = largest;
      float sum = state.sum[f][half] * rescale;
#pragma unroll
      for (int block = 0; block < Tile::kKeys / 8; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[f][block][i] = exp2_fast(fmaf(scores[f][block][i], scale_log2, -origin));
          sum += scores[f][block][i];
        }
      }
      state.sum[f][half] = sum;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        state.out[f][block][2 * half] *= rescale;
        state.out[f][block][2 * half + 1] *= rescale;
      }
    }
  }
}

template <class Tile>
__device__ inline void drop_tile(Scores<Tile>& powers, const AttentionWork& work, std::uint64_t head_element, int first_query,
                                 int first_key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + 16 * f + 8 * half + lane / 4;
      const std::uint64_t element =
          head_element + static_cast<std::uint64_t>(query) * work.dropout.side + first_key + lane % 4 * 4;
#pragma unroll
      for (int pair = 0; pair < Tile::kKeys / 16; ++pair) {
        drop_four(powers[f][2 * pair], powers[f][2 * pair + 1], half, four_words(work.dropout, element + 16 * pair),
                  work.dropout.threshold);
      }
    }
  }
}

/// out += powers times values.
template <class T, class Tile>
__device__ inline void add_values(WarpState<Tile>& state, const Scores<Tile>& powers, const std::uint16_t* values) {
#pragma unroll
  for (int pair = 0; pair < Tile::kKeys / 16; ++pair) {
    Fragment left[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) pack_left<T>(left[f], powers[f][2 * pair], powers[f][2 * pair + 1]);
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      Fragment right;
      load_right<Tile::kHead, Order::fours>(right, values, 16 * pair, step);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) multiply_pair<T>(state.out[f][2 * step], state.out[f][2 * step + 1], left[f], right);
    }
  }
}

/// A warp's rows through its part of shared memory, where its queries were, so that a row is written in 16-byte pieces.
template <class T, class Tile>
__device__ inline void store_rounded(const AttentionWork& work, int row, int head, int first_query, const WarpState<Tile>& state,
                                     const float (&factors)[kFragments][2], std::uint16_t* tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  __syncwarp();
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = warp_row + 16 * f + 8 * half + lane / 4;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const float* sums = state.out[f][block] + 2 * half;
        std::uint16_t* to = tile + tile_index<Tile::kHead>(tile_row, block) + lane % 4 * 2;
        *reinterpret_cast<std::uint32_t*>(to) = pack_pair<T>(sums[0] * factors[f][half], sums[1] * factors[f][half]);
      }
    }
  }
  __syncwarp();
  constexpr int kChunks = Tile::kHead / kChunk;
  const int chunk = lane % kChunks;
  if (chunk * kChunk >= work.head_size) return;
  for (int r = lane / kChunks; r < kWarpRows && first_query + r < work.queries; r += 32 / kChunks) {
    auto* to = operand_at<std::uint16_t>(work, work.out, row, head, first_query + r) + chunk * kChunk;
    *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(tile + tile_index<Tile::kHead>(warp_row + r, chunk));
  }
}

/// Normalises and stores the output and logsumexp of a warp.
template <class T, class Tile>
__device__ inline void store_warp(const AttentionWork& work, int row, int head, int first_query, WarpState<Tile>& state,
                                  std::uint16_t* tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto* logsumexp = static_cast<float*>(work.logsumexp) + statistic_index(work, row, head, 0);
  float factors[kFragments][2];
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + 16 * f + 8 * half + lane / 4;
      const float sum = quad_sum(state.sum[f][half]);
      const float total = state.largest[f][half] * static_cast<float>(work.scale) + logf(sum);
      Merged<float> merged = {0, 1, total};
      const bool seen = sum != 0 && query < work.queries;  // NaN is seen
      if (work.accumulate && seen) merged = merge(logsumexp[query], total);
      factors[f][half] = merged.factor * static_cast<float>(work.dropout.keep_scale) / sum;
      __syncwarp();  // all four lanes of a row have read what one of them writes
      if (seen && lane % 4 == 0) logsumexp[query] = merged.logsumexp;
      if (work.accumulate && seen) {
        store_sums<T>(work, work.out, row, head, query, state.out[f], half, factors[f][half], merged.carry);
      }
    }
  }
  if (!work.accumulate) store_rounded<T, Tile>(work, row, head, first_query, state, factors, tile);
}

template <class T, class Tile, bool kDropout>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const AttentionWork work) {
  GPU_DYNAMIC_SHARED(std::uint16_t, shared);
  std::uint16_t* const buffers = shared + Tile::kQueryElements;  // [2][keys, values]
  // Heavy blocks, which see most keys, go first.
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x), head = static_cast<int>(blockIdx.y),
            row = static_cast<int>(blockIdx.z);
  const int first_query = tile * kQueries, warp_query = first_query + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  const TileSight block_sees = tile_sight(work, row, first_query, kQueries);
  const int begin = block_sees.some.begin / Tile::kKeys * Tile::kKeys, end = block_sees.some.end;
  if (begin >= end && work.accumulate) return;

  const auto load_keys = [&](int first_key, int buffer) {
    std::uint16_t* to = buffers + buffer * 2 * Tile::kKeyElements;
    load_tile<Tile::kKeys, Tile::kHead, kThreads>(to, work, work.key, row, head, first_key, work.keys);
    load_tile<Tile::kKeys, Tile::kHead, kThreads>(to + Tile::kKeyElements, work, work.value, row, head, first_key, work.keys);
    copy_async_commit();
  };
  load_tile<kQueries, Tile::kHead, kThreads>(shared, work, work.query, row, head, first_query, work.queries);
  load_keys(begin, 0);

  const bool warp_works = warp_query < work.queries;
  const TileSight warp_sees = tile_sight(work, row, warp_works ? warp_query : first_query, kWarpRows);
  WarpQuery<Tile> query(shared);
  WarpState<Tile> state;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    set_zero(state.out[f]);
    for (int half = 0; half < 2; ++half) state.largest[f][half] = -INFINITY, state.sum[f][half] = 0;
  }
  const float scale_log2 = static_cast<float>(work.scale) * kLog2E;
  const std::uint64_t head_element = kDropout ? first_mask_element(work, row, head) : 0;

  int buffer = 0;
  for (int first_key = begin; first_key < end; first_key += Tile::kKeys, buffer ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is there for all, and nobody still reads the buffer that the next one goes to
    if (first_key == begin) query.load();
    if (first_key + Tile::kKeys < end) load_keys(first_key + Tile::kKeys, buffer ^ 1);
    if (!warp_works || first_key >= warp_sees.some.end || first_key + Tile::kKeys <= warp_sees.some.begin) continue;
    const std::uint16_t* keys = buffers + buffer * 2 * Tile::kKeyElements;
    Scores<Tile> scores;
    score_tile<T, Tile>(scores, query, keys);
    if (first_key < warp_sees.all.begin || first_key + Tile::kKeys > warp_sees.all.end) {
      hide_unseen<Tile>(scores, work, row, warp_query, first_key);
    }
    softmax_tile<Tile>(scores, state, scale_log2);
    if constexpr (kDropout) drop_tile<Tile>(scores, work, head_element, warp_query, first_key);
    add_values<T, Tile>(state, scores, keys + Tile::kKeyElements);
  }
  if (warp_works) store_warp<T, Tile>(work, row, head, warp_query, state, shared);
}

template <class T, int kHead>
void launch_head(const AttentionWork& work, StreamHandle stream) {
  using Tile = Tiling<kHead, kHead <= 64 ? 64 : 32>;
  using DropoutTile = Tiling<kHead, 32>;
  const dim3 grid = tile_grid(work, work.queries, kQueries);
  if (work.dropout.row_ids != nullptr) {
    launch(forward_kernel<T, DropoutTile, true>, grid, dim3(kThreads), DropoutTile::kSharedBytes, stream, work);
  } else {
    launch(forward_kernel<T, Tile, false>, grid, dim3(kThreads), Tile::kSharedBytes, stream, work);
  }
}

}  // namespace

void launch_attention_forward_tensor_core(const AttentionWork& work, StreamHandle stream) {
  const auto run = [&]<class T>(T) {
    if (work.head_size <= 64) {
      launch_head<T, 64>(work, stream);
    } else {
      launch_head<T, 128>(work, stream);
    }
  };
  work.dtype == DType::bf16 ? run(bf16{}) : run(f16{});
}

}  // namespace tandem::TANDEM_GPU
