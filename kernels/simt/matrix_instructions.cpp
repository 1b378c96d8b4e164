// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "core/dtype.h"
#include "kernels/cuda/launch.cuh"

// This file is built without -fsanitize=thread, like block.cpp: what lanes hand over at a meeting is ordered by it.
namespace tandem::simt_gpu {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// Of the warp: row `row` of matrix `matrix` as its lane read it.
const std::uint16_t* matrix_row(const BlockThread* lanes, int matrix, int row) {
  return reinterpret_cast<const std::uint16_t*>(lanes[8 * matrix + row].give);
}

std::uint32_t two(std::uint16_t low, std::uint16_t high) { return low | std::uint32_t{high} << 16; }

void load_matrices(std::uint32_t (&r)[4], const std::uint32_t (&row)[4], Together together, const char* file, int line) {
  BlockThread& lane = *current_lane;
  std::memcpy(lane.give, row, sizeof row);
  meet_warp(kAllLanes, together, file, line);
  std::memcpy(r, lane.take, sizeof r);
}

/// lanes[l].take = d + a b, from lanes[l].give = a, b, d; the layout is in launch.cuh. Sums in ascending order of the inner
/// index.
template <float (*widened)(std::uint16_t)>
void multiply_matrices(BlockThread* lanes, unsigned /*mask*/) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    const std::uint32_t* const give = lanes[l].give;
    for (int half = 0; half < 2; ++half) {
      const auto element = [half](std::uint32_t pair) { return widened(static_cast<std::uint16_t>(pair >> (16 * half))); };
      a[g][2 * t + half] = element(give[0]);
      a[g + 8][2 * t + half] = element(give[1]);
      a[g][2 * t + 8 + half] = element(give[2]);
      a[g + 8][2 * t + 8 + half] = element(give[3]);
      b[2 * t + half][g] = element(give[4]);
      b[2 * t + 8 + half][g] = element(give[5]);
    }
  }
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
      float sum = 0;
      std::memcpy(&sum, &lanes[l].give[6 + i], sizeof sum);
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      std::memcpy(&lanes[l].take[i], &sum, sizeof sum);
    }
  }
}

void multiply(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], Together together, const char* file,
              int line) {
  BlockThread& lane = *current_lane;
  std::memcpy(lane.give, a, sizeof a);
  std::memcpy(lane.give + 4, b, sizeof b);
  std::memcpy(lane.give + 6, d, sizeof d);
  meet_warp(kAllLanes, together, file, line);
  std::memcpy(d, lane.take, sizeof d);
}

float wide_bf16(std::uint16_t bits) { return from_bf16_bits(bits); }
float wide_f16(std::uint16_t bits) { return from_f16_bits(bits); }

/// r[i] of lane l: columns 2 (l % 4) and + 1 of row l / 4 of matrix i.
void hand_out_rows(BlockThread* lanes, unsigned /*mask*/) {
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) {
      const std::uint16_t* const row = matrix_row(lanes, i, l / 4) + static_cast<std::ptrdiff_t>(2 * (l % 4));
      lanes[l].take[i] = two(row[0], row[1]);
    }
  }
}

/// r[i] of lane l: rows 2 (l % 4) and + 1 of column l / 4 of matrix i.
void hand_out_columns(BlockThread* lanes, unsigned /*mask*/) {
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) {
      lanes[l].take[i] = two(matrix_row(lanes, i, 2 * (l % 4))[l / 4], matrix_row(lanes, i, 2 * (l % 4) + 1)[l / 4]);
    }
  }
}

}  // namespace

void exchange_matrices(std::uint32_t (&r)[4], const std::uint32_t (&row)[4], bool transposed, const char* file, int line) {
  load_matrices(r, row, transposed ? hand_out_columns : hand_out_rows, file, line);
}

void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bf16 /*tag*/, const char* file,
                 int line) {
  multiply(d, a, b, multiply_matrices<wide_bf16>, file, line);
}
void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], f16 /*tag*/, const char* file,
                 int line) {
  multiply(d, a, b, multiply_matrices<wide_f16>, file, line);
}

}  // namespace tandem::simt_gpu
