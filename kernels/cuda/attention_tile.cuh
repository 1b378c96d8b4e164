// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit numbers in shared memory and the fragments of mma.sync m16n8k16 made of them.
//
// Of a fragment of sums [16, 8], lane l holds rows g = l / 4 and g + 8, columns 2 c and 2 c + 1, c = l % 4. Where the 8-column
// blocks 2 p and 2 p + 1 of a row of scores stand side by side, they are the left operand of the next product, 16 deep.
//
// The order of keys within 16 is free as long as both products agree. `Order::fours` deals them so that a lane's four numbers of
// two neighbouring blocks belong to keys 4 c ... 4 c + 3: one Philox block of the mask. Block j, column n is key 4 (n / 2) + 2 j
// + n % 2.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/attention_device.cuh"

namespace tandem::TANDEM_GPU {

#ifdef TANDEM_SIMT
inline float exp2_fast(float x) { return std::exp2(x); }
template <class T>
std::uint32_t pack_pair(float low, float high) {
  return from_wide<T>(low).bits | static_cast<std::uint32_t>(from_wide<T>(high).bits) << 16;
}
#else
/// 2^x to 2 units of fp32; results below the least normal number are 0.
__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
/// Two numbers rounded to T, the first in the lower half.
template <class T>
__device__ std::uint32_t pack_pair(float low, float high);
template <>
__device__ inline std::uint32_t pack_pair<bf16>(float low, float high) {
  std::uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ inline std::uint32_t pack_pair<f16>(float low, float high) {
  std::uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
#endif

/// 16 bytes, to move.
struct alignas(16) Chunk {
  std::uint32_t word[4];
};
inline constexpr int kChunk = 8;  // 16-bit numbers in one

enum class Order : std::uint8_t { natural, fours };

inline constexpr float kLog2E = 1.4426950408889634F;

/// Element where chunk `chunk` of a row of a tile of kHead columns begins. The swizzle spreads the rows that one load_matrix
/// reads over all banks, in both orders: rows 8 i ... 8 i + 7, and rows whose second bit alone is the same. It is the same 16
/// rows further on, which callers use: one address serves a whole column of fragments.
template <int kHead>
__device__ inline int tile_index(int row, int chunk) {
  const int swizzle = (row & 1) | (row >> 1 & 2) | ((row >> 1 ^ row >> 3) & 1) << 2;
  return row * kHead + (chunk ^ swizzle) * kChunk;
}

/// Starts copying tokens [first, first + kRows) of one head to a tile; zero beyond `limit` tokens and beyond head_size.
template <int kRows, int kHead, int kThreads>
__device__ void load_tile(std::uint16_t* tile, const AttentionWork& work, const AttentionOperand& operand, int row, int head,
                          int first, int limit) {
  constexpr int kChunks = kHead / kChunk, kRowsAtOnce = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % 16 == 0 && (kRowsAtOnce == 8 || kRowsAtOnce == 16));
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, begin = static_cast<int>(threadIdx.x) / kChunks;
  const bool has_chunk = chunk * kChunk < work.head_size;
  const auto* from = operand_at<const std::uint16_t>(work, operand, row, head, first + begin) + chunk * kChunk;
  const int left = has_chunk ? limit - first - begin : 0;
  const std::int64_t step = kRowsAtOnce * operand.token_stride;
#pragma unroll
  for (int r = 0; r < kRows; r += kRowsAtOnce, from += step) {
    std::uint16_t* const to = tile + tile_index<kHead>(begin + r % 16, chunk) + r / 16 * 16 * kHead;
    copy_async_16_or_zero(to, from, r < left);
  }
}

using Fragment = std::uint32_t[4];

/// Element of chunk 2 step + half, in a form that leaves one addition and one exclusive or to each step: `row` and `half` are a
/// lane's, step is known to the compiler.
template <int kHead>
__device__ inline int step_index(int row, int half, int step) {
  return tile_index<kHead>(row, half) ^ 16 * step;
}

/// Left operand [16, 16], channels [16 step, + 16): `row` is the tile's row for fragment row lane % 16.
template <int kHead>
__device__ inline void load_left(Fragment& fragment, const std::uint16_t* tile, int row, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  load_matrix_x4(fragment, tile + step_index<kHead>(row, lane / 16, step));
}

/// Row of a tile, within 16, for number n of block j.
template <Order kOrder>
__device__ inline int row_in_16(int block, int n) {
  return kOrder == Order::natural ? 8 * block + n : 4 * (n >> 1) + 2 * block + (n & 1);
}

/// Right operands of a product with the tile transposed, S = A tile^T: channels [16 step, + 16), tile rows [first, first + 16) as
/// two blocks of columns: words 0, 1 of the first, 2, 3 of the second.
template <int kHead, Order kOrder>
__device__ inline void load_right_transposed(Fragment& fragment, const std::uint16_t* tile, int first, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = row_in_16<kOrder>(lane / 16, lane % 8);
  load_matrix_x4(fragment, tile + step_index<kHead>(row, lane / 8 % 2, step) + first * kHead);
}

/// Right operands of a product with the tile, O = A tile: tile rows [first, first + 16), channels [16 step, + 16) as two blocks.
template <int kHead, Order kOrder>
__device__ inline void load_right(Fragment& fragment, const std::uint16_t* tile, int first, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = row_in_16<kOrder>(lane / 8 % 2, lane % 8);
  load_matrix_x4_transposed(fragment, tile + step_index<kHead>(row, lane / 16, step) + first * kHead);
}

/// Two products side by side with the two right operands of a fragment.
template <class T>
__device__ inline void multiply_pair(float (&first)[4], float (&second)[4], const Fragment& left, const Fragment& right) {
  const std::uint32_t right_first[2] = {right[0], right[1]}, right_second[2] = {right[2], right[3]};
  mma_16x8x16(first, left, right_first, T{});
  mma_16x8x16(second, left, right_second, T{});
}

/// Two blocks of sums as left operand, rounded to T.
template <class T>
__device__ inline void pack_left(Fragment& fragment, const float (&first)[4], const float (&second)[4]) {
  fragment[0] = pack_pair<T>(first[0], first[1]);
  fragment[1] = pack_pair<T>(first[2], first[3]);
  fragment[2] = pack_pair<T>(second[0], second[1]);
  fragment[3] = pack_pair<T>(second[2], second[3]);
}

template <int kBlocks>
using Sums = float[kBlocks][4];
template <int kBlocks>
__device__ inline void set_zero(Sums<kBlocks>& sums) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[block][i] = 0;
  }
}

/// A row of sums [head_size] goes to global memory: this lane's part, two neighbouring columns of each block (half 0: row g, 1: g
/// + 8). Adds to what is there where `add`; `carry` is its factor.
template <class Stored, int kBlocks>
__device__ inline void store_sums_as(Stored* to, const Sums<kBlocks>& sums, int half, float factor, bool add, float carry,
                                     int head_size) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int at = block * 8 + column;
    if (at >= head_size) break;
    float low = factor * sums[block][2 * half], high = factor * sums[block][2 * half + 1];
    if (add) {
      low += carry * to_wide(to[at]);
      high += carry * to_wide(to[at + 1]);
    }
    if constexpr (sizeof(Stored) == 2) {
      *reinterpret_cast<std::uint32_t*>(to + at) = pack_pair<Stored>(low, high);
    } else {
      to[at] = low;
      to[at + 1] = high;
    }
  }
}
/// The same for row `token` of an operand of `work.sums` where it is added to, else of T.
template <class T, int kBlocks>
__device__ inline void store_sums(const AttentionWork& work, const AttentionOperand& operand, int row, int head, int token,
                                  const Sums<kBlocks>& sums, int half, float factor, float carry) {
  if (work.accumulate && work.sums == DType::f32) {
    store_sums_as(operand_at<float>(work, operand, row, head, token), sums, half, factor, true, carry, work.head_size);
  } else {
    store_sums_as(operand_at<T>(work, operand, row, head, token), sums, half, factor, work.accumulate, carry, work.head_size);
  }
}

/// The mask of four neighbouring keys applied to a lane's four numbers of two blocks (order `fours`), rows g (half 0) or g + 8.
__device__ inline void drop_four(float (&first)[4], float (&second)[4], int half, const FourWords& words,
                                 std::uint32_t threshold) {
  if (words.word[0] < threshold) first[2 * half] = 0;
  if (words.word[1] < threshold) first[2 * half + 1] = 0;
  if (words.word[2] < threshold) second[2 * half] = 0;
  if (words.word[3] < threshold) second[2 * half + 1] = 0;
}

}  // namespace tandem::TANDEM_GPU
