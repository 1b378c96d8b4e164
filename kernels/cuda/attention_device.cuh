// SPDX-License-Identifier: Apache-2.0
// What all kernels of attention share: who sees what, and the mask.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/rng.h"
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace tandem::TANDEM_GPU {

/// A block for each tile of `tile` of `tokens`, each head and each row.
inline dim3 tile_grid(const AttentionWork& work, int tokens, int tile) {
  return dim3(static_cast<unsigned>((tokens + tile - 1) / tile), static_cast<unsigned>(work.heads),
              static_cast<unsigned>(work.rows));
}

/// Keys [begin, end) of the segment.
struct SeenKeys {
  int begin, end;
  __device__ bool has(int key) const { return key >= begin && key < end; }
};

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }
__device__ inline int larger(int a, int b) { return a > b ? a : b; }

/// Those that a query sees; none where there is no such query.
__device__ inline SeenKeys seen_keys(const AttentionWork& work, int row, int query) {
  if (query >= work.queries) return {0, 0};
  const int start = work.starts == nullptr ? -work.key_begin : work.starts[static_cast<std::int64_t>(row) * work.queries + query];
  return {larger(start, 0), smaller(query + work.key_offset + 1, work.keys)};
}

/// What queries [first, first + count) see: some of them something in `some`, and each of them all of `all`.
struct TileSight {
  SeenKeys some, all;
};
__device__ inline TileSight tile_sight(const AttentionWork& work, int row, int first, int count) {
  const int last = smaller(first + count, work.queries) - 1;
  int least = -work.key_begin, most = least;
  if (work.tile_starts != nullptr) {
    const int tiles = (work.queries + kStartTile - 1) / kStartTile;
    const std::int32_t* entries = work.tile_starts + static_cast<std::int64_t>(row) * tiles * 2;
    const int begin = first / kStartTile, end = last / kStartTile;
    least = entries[2 * begin];
    most = entries[2 * begin + 1];
    for (int tile = begin + 1; tile <= end; ++tile) {
      least = smaller(least, entries[2 * tile]);
      most = larger(most, entries[2 * tile + 1]);
    }
  }
  return {{larger(least, 0), smaller(last + work.key_offset + 1, work.keys)},
          {larger(most, 0), smaller(first + work.key_offset + 1, work.keys)}};
}

/// Index of an operand's element: of head `head` of token `token`.
__device__ inline std::int64_t operand_index(const AttentionWork& work, const AttentionOperand& operand, int row, int head,
                                             int token) {
  return row * operand.row_stride + token * operand.token_stride + static_cast<std::int64_t>(head) * work.head_size;
}
template <class T>
__device__ T* operand_at(const AttentionWork& work, const AttentionOperand& operand, int row, int head, int token) {
  return static_cast<T*>(operand.data) + operand_index(work, operand, row, head, token);
}

/// Of [rows, heads, queries].
__device__ inline std::int64_t statistic_index(const AttentionWork& work, int row, int head, int query) {
  return (static_cast<std::int64_t>(row) * work.heads + head) * work.queries + query;
}

/// Mask element of query 0 and key 0 of a head.
__device__ inline std::uint64_t first_mask_element(const AttentionWork& work, int row, int head) {
  const AttentionDropout& dropout = work.dropout;
  if (dropout.row_ids == nullptr) return 0;
  return static_cast<std::uint64_t>(dropout.row_ids[row] * dropout.row_elements +
                                    (dropout.first_head + head) * dropout.side * dropout.side + work.first_mask_element);
}

/// What the tensor core kernels' backward needs of a query beside its rows, 16 bytes to copy; zeros where there is no such query.
struct alignas(16) QueryLine {
  float logsumexp2, dot;  // in powers of two; sum of dout * out
  int seen_begin, seen_end;
};
/// Of [rows, heads, queries in tiles of kStartTile].
__device__ inline std::int64_t line_index(const AttentionWork& work, int row, int head, int query) {
  const int padded = (work.queries + kStartTile - 1) / kStartTile * kStartTile;
  return (static_cast<std::int64_t>(row) * work.heads + head) * padded + query;
}

/// Words of four mask elements.
struct FourWords {
  std::uint32_t word[4];
};
/// Those of elements [4 block, 4 block + 4): philox4x32() of core/rng.h.
__device__ inline FourWords block_words(const AttentionDropout& dropout, std::uint64_t block) {
  FourWords c = {{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), dropout.key.step,
                  dropout.key.layer * 8 + static_cast<std::uint32_t>(dropout.key.site)}};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c.word[0], product1 = std::uint64_t{0xCD9E8D57U} * c.word[2];
    c = {{static_cast<std::uint32_t>(product1 >> 32) ^ c.word[1] ^ dropout.rounds.keys[round][0],
          static_cast<std::uint32_t>(product1),
          static_cast<std::uint32_t>(product0 >> 32) ^ c.word[3] ^ dropout.rounds.keys[round][1],
          static_cast<std::uint32_t>(product0)}};
  }
  return c;
}
/// Those of elements [element, element + 4), which are one block where `element` is a multiple of four.
__device__ inline FourWords four_words(const AttentionDropout& dropout, std::uint64_t element) {
  const FourWords first = block_words(dropout, element / 4);
  const auto shift = static_cast<unsigned>(element % 4);
  if (shift == 0) return first;
  const FourWords second = block_words(dropout, element / 4 + 1);
  // Written out, so that nothing is indexed by a variable and all stays in registers.
  if (shift == 1) return {{first.word[1], first.word[2], first.word[3], second.word[0]}};
  if (shift == 2) return {{first.word[2], first.word[3], second.word[0], second.word[1]}};
  return {{first.word[3], second.word[0], second.word[1], second.word[2]}};
}

/// How a segment's (largest-free) statistics join those of earlier ones: out <- carry * out + factor * (sum of e^(s - l) v).
template <class Real>
struct Merged {
  Real carry, factor, logsumexp;
};
/// `total` is the segment's own logsumexp. Shares in terms of the smaller over the larger part, so that they add up to one.
template <class Real>
__device__ Merged<Real> merge(Real earlier, Real total) {
  if (earlier == -static_cast<Real>(INFINITY)) return {Real(0), Real(1), total};
  const bool grows = total > earlier;
  const Real ratio = std::exp(grows ? earlier - total : total - earlier), share = Real(1) / (Real(1) + ratio);
  return {grows ? ratio * share : share, grows ? share : ratio * share, (grows ? total : earlier) + std::log1p(ratio)};
}

}  // namespace tandem::TANDEM_GPU
