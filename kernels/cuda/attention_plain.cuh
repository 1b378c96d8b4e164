// SPDX-License-Identifier: Apache-2.0
// Attention in the arithmetic of the wide type, for any dtype and head size: tiles of kTile queries and kTile keys in shared
// memory. A block has (kTile / 2)^2 threads; of a product of two tiles a thread forms rows y and y + kTile / 2, columns x and x +
// kTile / 2.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "core/error.h"
#include "kernels/cuda/attention_device.cuh"

namespace tandem::TANDEM_GPU {

template <int kTile>
struct PlainBlock {
  static constexpr int kHalf = kTile / 2, kThreads = kHalf * kHalf;
  static constexpr int kStrip = kTile * (kTile + 1);  // elements of a strip [kTile, kTile + 1]
  int x = static_cast<int>(threadIdx.x) % kHalf, y = static_cast<int>(threadIdx.x) / kHalf;
};

/// Numbers that one row of a tile takes: an odd number, so that rows begin in different banks.
__host__ __device__ inline int tile_stride(int head_size) { return head_size | 1; }

/// tile = tokens [first, first + kTile) of one head; zero from `limit` on.
template <class T, int kTile>
__device__ void load_rows(Wide<T>* tile, const AttentionWork& work, const AttentionOperand& operand, int row, int head, int first,
                          int limit) {
  const PlainBlock<kTile> at;
  for (int r = at.y; r < kTile; r += at.kHalf) {
    const T* from = operand_at<const T>(work, operand, row, head, first + r);
    Wide<T>* to = tile + r * tile_stride(work.head_size);
    for (int c = at.x; c < work.head_size; c += at.kHalf) to[c] = first + r < limit ? to_wide(from[c]) : Wide<T>(0);
  }
}

template <class Real, int kTile>
__device__ void clear_rows(Real* tile, int head_size) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * tile_stride(head_size); i += PlainBlock<kTile>::kThreads) tile[i] = 0;
}

/// sums = this thread's part of left right^T.
template <class Real, int kTile>
__device__ void multiply_rows(Real (&sums)[2][2], const Real* left, const Real* right, int head_size) {
  const PlainBlock<kTile> at;
  const int stride = tile_stride(head_size);
  for (auto& line : sums) line[0] = line[1] = 0;
  for (int c = 0; c < head_size; ++c) {
    const Real l[2] = {left[at.y * stride + c], left[(at.y + at.kHalf) * stride + c]};
    const Real r[2] = {right[at.x * stride + c], right[(at.x + at.kHalf) * stride + c]};
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) sums[i][j] += l[i] * r[j];
    }
  }
}

/// strip = scaled scores of one tile of keys, -infinity where a query does not see one.
template <class Real, int kTile>
__device__ void score_strip(Real* strip, const AttentionWork& work, const Real* query, const Real* keys, int row, int first_query,
                            int first_key) {
  const PlainBlock<kTile> at;
  Real sums[2][2];
  multiply_rows<Real, kTile>(sums, query, keys, work.head_size);
  for (int i = 0; i < 2; ++i) {
    const int y = at.y + i * at.kHalf;
    const SeenKeys seen = seen_keys(work, row, first_query + y);
    for (int j = 0; j < 2; ++j) {
      const int x = at.x + j * at.kHalf;
      strip[y * (kTile + 1) + x] =
          seen.has(first_key + x) ? sums[i][j] * static_cast<Real>(work.scale) : -static_cast<Real>(INFINITY);
    }
  }
}

enum class Strip : std::uint8_t { plain, transposed };

/// out rows = factors (null: 1) times out + strip rows, or with `transposed` the sum over them. strip [kTile, kTile + 1].
template <Strip kStrip, class Real, int kTile>
__device__ void add_rows(Real* out, const Real* factors, const Real* strip, const Real* rows, int head_size) {
  const PlainBlock<kTile> at;
  const int stride = tile_stride(head_size);
  for (int r = at.y; r < kTile; r += at.kHalf) {
    const Real factor = factors == nullptr ? Real(1) : factors[r];
    for (int c = at.x; c < head_size; c += at.kHalf) {
      Real sum = 0;
      for (int k = 0; k < kTile; ++k) {
        sum += strip[kStrip == Strip::plain ? r * (kTile + 1) + k : k * (kTile + 1) + r] * rows[k * stride + c];
      }
      out[r * stride + c] = factor * out[r * stride + c] + sum;
    }
  }
}

/// Stores a result, or adds it to `carry` times what is there where a segment is merged.
template <class T>
__device__ void store_result(const AttentionWork& work, const AttentionOperand& operand, std::int64_t index, Wide<T> value,
                             Wide<T> carry) {
  if constexpr (sizeof(T) == 2) {
    if (work.accumulate && work.sums == DType::f32) {
      float& sum = static_cast<float*>(operand.data)[index];
      sum = carry * sum + value;
      return;
    }
  }
  T& stored = static_cast<T*>(operand.data)[index];
  stored = from_wide<T>(work.accumulate ? carry * to_wide(stored) + value : value);
}

/// Tokens [first, first + kTile) of one head of `operand` = factor * tile, or that added; `limit` tokens in all.
template <class T, int kTile>
__device__ void store_rows(const Wide<T>* tile, const AttentionWork& work, const AttentionOperand& operand, int row, int head,
                           int first, int limit, Wide<T> factor) {
  const PlainBlock<kTile> at;
  for (int r = at.y; r < kTile && first + r < limit; r += at.kHalf) {
    const std::int64_t index = operand_index(work, operand, row, head, first + r);
    for (int c = at.x; c < work.head_size; c += at.kHalf) {
      store_result<T>(work, operand, index + c, factor * tile[r * tile_stride(work.head_size) + c], Wide<T>(1));
    }
  }
}

/// What a kept probability is multiplied by: 0 or 1 / (1 - p), and 1 without dropout.
template <class Real>
__device__ Real mask_factor(const AttentionWork& work, std::uint64_t head_element, int query, int key) {
  const AttentionDropout& dropout = work.dropout;
  if (dropout.row_ids == nullptr) return 1;
  const std::uint64_t element = head_element + static_cast<std::uint64_t>(query) * static_cast<std::uint64_t>(dropout.side) + key;
  return dropout.key.word(element) >= dropout.threshold ? static_cast<Real>(dropout.keep_scale) : Real(0);
}

/// Index of a kept probability.
__device__ inline std::int64_t kept_index(const AttentionWork& work, int row, int head, int query, int key) {
  return statistic_index(work, row, head, query) * work.keys + key;
}

/// Reduces over the kTile / 4 neighbouring threads that share a row.
template <int kTile, class Real, class Combine>
__device__ Real reduce_row(Real value, Combine combine) {
  for (int other = 1; other < kTile / 4; other *= 2) value = combine(value, __shfl_xor_sync(0xFFFFFFFFU, value, other));
  return value;
}
template <class Real>
__device__ Real larger_of(Real a, Real b) {
  return a > b ? a : b;  // b where either is NaN
}

/// Bytes of `tiles` tiles, `strips` strips and `lines` numbers a row.
template <class Real, int kTile>
int plain_shared_bytes(const AttentionWork& work, int tiles, int strips, int lines) {
  const std::int64_t numbers = kTile * (static_cast<std::int64_t>(tiles) * tile_stride(work.head_size) + lines) +
                               static_cast<std::int64_t>(strips) * PlainBlock<kTile>::kStrip;
  return static_cast<int>(numbers * static_cast<std::int64_t>(sizeof(Real)));
}

/// Calls run(integral_constant kTile, bytes): 32, or 16 where tiles of 32 would leave a multiprocessor one block.
template <class Real, class Run>
void with_plain_tile(const AttentionWork& work, int tiles, int strips, int lines, const Run& run) {
  constexpr int kComfortable = 100 * 1024, kMost = 227 * 1024;
  const int large = plain_shared_bytes<Real, 32>(work, tiles, strips, lines);
  const int small = plain_shared_bytes<Real, 16>(work, tiles, strips, lines);
  if (large <= kComfortable) return run(std::integral_constant<int, 32>{}, large);
  TANDEM_CHECK(small <= kMost, "a head of " + std::to_string(work.head_size) + " does not fit into shared memory");
  run(std::integral_constant<int, 16>{}, small);
}

}  // namespace tandem::TANDEM_GPU
