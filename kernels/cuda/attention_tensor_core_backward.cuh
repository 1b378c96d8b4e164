// SPDX-License-Identifier: Apache-2.0
// What both backward kernels on tensor cores share. As in the plain ones, one makes the gradients of keys and values and one that
// of queries: seven products instead of the five of one pass with atomic sums, and the same bits every time. Each warp keeps its
// 32 or 16 rows (keys or queries) in registers and goes through the others in tiles, 16 of them at a time.
#pragma once

#include "kernels/cuda/attention_tile.cuh"

namespace tandem::TANDEM_GPU {

inline constexpr int kBackwardThreads = 128;

template <int kChannels>
struct BackwardTiling {
  static constexpr int kHead = kChannels;
  static constexpr int kFragments = kHead <= 64 ? 2 : 1;  // of 16 rows, of a warp
  static constexpr int kWarpRows = 16 * kFragments, kRows = kWarpRows * kBackwardThreads / 32;
  static constexpr int kOthers = kStartTile;  // rows of a tile that is gone through
  static constexpr int kSteps = kHead / 16, kBlocks = kHead / 8;
  static constexpr int kRowElements = kRows * kHead, kOtherElements = kOthers * kHead;
  static constexpr int kSharedBytes = 2 * (2 * kRowElements + 4 * kOtherElements);
};

/// A warp's rows of a tile as left operands.
template <class Tile>
using WarpRows = Fragment[Tile::kFragments][Tile::kSteps];
/// Products of a warp's rows with 16 others.
template <class Tile>
using Products = Sums<2>[Tile::kFragments];
/// Sums for a warp's rows.
template <class Tile>
using RowSums = Sums<Tile::kBlocks>[Tile::kFragments];
template <class Tile>
__device__ inline void clear_sums(RowSums<Tile>& sums) {
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) set_zero(sums[f]);
}

/// The rows of a tile that this lane addresses, `lane_row` and `apart` rows further for each fragment.
template <class Tile>
__device__ inline void load_warp_rows(WarpRows<Tile>& rows, const std::uint16_t* tile, int lane_row, int apart) {
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) load_left<Tile::kHead>(rows[f][step], tile, lane_row + f * apart, step);
  }
}

/// products = rows times 16 rows of `tile`, transposed.
template <class T, class Tile, Order kOrder>
__device__ inline void multiply_others(Products<Tile>& products, const WarpRows<Tile>& rows, const std::uint16_t* tile,
                                       int first) {
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) set_zero(products[f]);
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    Fragment right;
    load_right_transposed<Tile::kHead, kOrder>(right, tile, first, step);
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) multiply_pair<T>(products[f][0], products[f][1], rows[f][step], right);
  }
}

/// sums += products, rounded to T, times 16 rows of `tile`.
template <class T, class Tile, Order kOrder>
__device__ inline void add_others(RowSums<Tile>& sums, const Products<Tile>& products, const std::uint16_t* tile, int first) {
  Fragment left[Tile::kFragments];
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) pack_left<T>(left[f], products[f][0], products[f][1]);
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    Fragment right;
    load_right<Tile::kHead, kOrder>(right, tile, first, step);
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) multiply_pair<T>(sums[f][2 * step], sums[f][2 * step + 1], left[f], right);
  }
}

/// Starts copying tokens [first, first + kOthers) of two operands side by side.
template <class Tile>
__device__ inline void load_others(std::uint16_t* to, const AttentionWork& work, const AttentionOperand& one,
                                   const AttentionOperand& two, int row, int head, int first, int limit) {
  load_tile<Tile::kOthers, Tile::kHead, kBackwardThreads>(to, work, one, row, head, first, limit);
  load_tile<Tile::kOthers, Tile::kHead, kBackwardThreads>(to + Tile::kOtherElements, work, two, row, head, first, limit);
}

}  // namespace tandem::TANDEM_GPU
