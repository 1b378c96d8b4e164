// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

/// A register of Reals; loads and stores may be unaligned and alias Real arrays.
template <class Real>
struct Register {
  typedef Real Type __attribute__((vector_size(kVectorBytes), aligned(alignof(Real)), may_alias));
  static constexpr Index kLanes = kVectorBytes / static_cast<Index>(sizeof(Real));
};

// The tile of C kept in registers: 4 x 4 of 32 registers (AVX-512), 4 x 2 of 16; at least eight sums in flight hide the latency
// of a multiply-add.
constexpr int kTileRows = 4;
constexpr int kTileRegisters = kVectorBytes == 64 ? 4 : 2;
template <class Real>
constexpr Index kTileColumns = kTileRegisters* Register<Real>::kLanes;

/// C [kRows, kRegisters * lanes] (+)= A B, B with unit stride along columns.
template <int kRows, int kRegisters, class Real>
inline void tile(Index k, const Real* a, Index a_row, Index a_column, const Real* b, Index b_row, Real* c, Index c_row,
                 bool accumulate) {
  using Vector = typename Register<Real>::Type;
  constexpr Index kLanes = Register<Real>::kLanes;
  Vector sums[kRows][kRegisters] = {};
  for (Index p = 0; p < k; ++p) {
    const Real* b_line = b + p * b_row;
    const Real* a_line = a + p * a_column;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Real factor = a_line[i * a_row];
#pragma GCC unroll 8
      for (int j = 0; j < kRegisters; ++j) sums[i][j] += factor * *reinterpret_cast<const Vector*>(b_line + j * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kRegisters; ++j) {
      auto* out = reinterpret_cast<Vector*>(c + i * c_row + j * kLanes);
      *out = accumulate ? *out + sums[i][j] : sums[i][j];
    }
  }
}

/// One strip of kRegisters registers of columns, any number of rows.
template <int kRegisters, class Real>
inline void tile_strip(Index m, Index k, const Real* a, Index a_row, Index a_column, const Real* b, Index b_row, Real* c,
                       Index c_row, bool accumulate) {
  Index i = 0;
  for (; i + kTileRows <= m; i += kTileRows) {
    tile<kTileRows, kRegisters>(k, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, accumulate);
  }
  for (; i < m; ++i) tile<1, kRegisters>(k, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, accumulate);
}

/// C [m, n] (+)= A B for n a multiple of the register's lanes: the building block of attention, whose buffers are padded to it.
template <class Real>
inline void padded_gemm(Index m, Index n, Index k, const Real* a, Index a_row, Index a_column, const Real* b, Index b_row,
                        Real* c, Index c_row, bool accumulate) {
  Index j = 0;
  for (; j + kTileColumns<Real> <= n; j += kTileColumns<Real>) {
    tile_strip<kTileRegisters>(m, k, a, a_row, a_column, b + j, b_row, c + j, c_row, accumulate);
  }
  for (; j < n; j += Register<Real>::kLanes) tile_strip<1>(m, k, a, a_row, a_column, b + j, b_row, c + j, c_row, accumulate);
}

constexpr Index kPanelDepth = 256;

/// Any shape and strides: panels of B and of A are copied to contiguous buffers, padded by zeros; the padding's sums are not
/// stored.
template <class Real>
void gemm(Index m, Index n, Index k, const Real* a, Index a_row, Index a_column, const Real* b, Index b_row, Index b_column,
          Real* c, Index c_row, bool accumulate) {
  constexpr Index kColumns = kTileColumns<Real>;
  alignas(64) Real b_panel[kPanelDepth * kColumns];
  alignas(64) Real a_panel[kPanelDepth * kTileRows];
  alignas(64) Real edge[kTileRows * kColumns];
  for (Index p0 = 0; p0 < k; p0 += kPanelDepth) {
    const Index depth = k - p0 < kPanelDepth ? k - p0 : kPanelDepth;
    const bool adds = accumulate || p0 > 0;
    for (Index j0 = 0; j0 < n; j0 += kColumns) {
      const Index width = n - j0 < kColumns ? n - j0 : kColumns;
      for (Index p = 0; p < depth; ++p) {
        const Real* from = b + (p0 + p) * b_row + j0 * b_column;
        for (Index j = 0; j < kColumns; ++j) b_panel[p * kColumns + j] = j < width ? from[j * b_column] : Real(0);
      }
      for (Index i0 = 0; i0 < m; i0 += kTileRows) {
        const Index height = m - i0 < kTileRows ? m - i0 : kTileRows;
        const Real* from = a + i0 * a_row + p0 * a_column;
        for (Index p = 0; p < depth; ++p) {
          for (Index i = 0; i < kTileRows; ++i)
            a_panel[p * kTileRows + i] = i < height ? from[i * a_row + p * a_column] : Real(0);
        }
        Real* to = c + i0 * c_row + j0;
        if (height == kTileRows && width == kColumns) {
          tile<kTileRows, kTileRegisters>(depth, a_panel, 1, kTileRows, b_panel, kColumns, to, c_row, adds);
        } else {
          tile<kTileRows, kTileRegisters>(depth, a_panel, 1, kTileRows, b_panel, kColumns, edge, kColumns, false);
          for (Index i = 0; i < height; ++i) {
            for (Index j = 0; j < width; ++j) to[i * c_row + j] = (adds ? to[i * c_row + j] : Real(0)) + edge[i * kColumns + j];
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
