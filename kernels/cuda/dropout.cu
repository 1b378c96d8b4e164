// SPDX-License-Identifier: Apache-2.0
// Dropout with its residual. The mask is drawn where it is needed, a Philox block of four words for four elements.
#include "kernels/cuda/dropout_mask.cuh"
#include "kernels/cuda/norm_kernels.h"
#include "kernels/cuda/vector_access.cuh"

namespace tandem::TANDEM_GPU {
namespace {

template <class T>
struct Operands {
  const T *x, *residual;
  T* out;
  std::int64_t rows, per_row;
};

constexpr std::int64_t kMostRows = 32768;  // of a grid; its blocks go on to the rows behind

/// Packs of the row on x, rows on y. Rows begin at whole Philox blocks.
template <class T, int kPack, bool kResidual>
__global__ void __launch_bounds__(kMapThreads) dropout_kernel(Operands<T> operands, Mask mask) {
  static_assert(kPack % 4 == 0);
  constexpr int kUnroll = 2;
  const std::int64_t packs = operands.per_row / kPack, first = map_first_pack<kUnroll>();
  for (std::int64_t row = blockIdx.y; row < operands.rows; row += gridDim.y) {
    const std::int64_t begin = row * operands.per_row;
    const std::uint64_t first_block = mask.first_element(row) / 4;
    Pack<T, kPack> x[kUnroll], residual[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t pack = first + u * kMapThreads;
      if (pack >= packs) continue;
      x[u] = load_pack<kPack>(operands.x + begin + pack * kPack);
      if constexpr (kResidual) residual[u] = load_pack<kPack>(operands.residual + begin + pack * kPack);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t pack = first + u * kMapThreads;
      if (pack >= packs) continue;
      Wide<T> values[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = to_wide(x[u].get(i));
#pragma unroll
      for (int part = 0; part < kPack / 4; ++part) {
        mask.apply(first_block + static_cast<std::uint64_t>(pack * (kPack / 4) + part), values + 4 * part);
      }
      if constexpr (kResidual) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) values[i] += to_wide(residual[u].get(i));
      }
      store_pack(operands.out + begin + pack * kPack, pack_of<T>(values));
    }
  }
}

/// Any sizes and addresses: a thread takes the elements of one Philox block.
template <class T>
__global__ void __launch_bounds__(kMapThreads) dropout_blocks_kernel(Operands<T> operands, Mask mask) {
  for (std::int64_t row = blockIdx.y; row < operands.rows; row += gridDim.y) {
    const std::uint64_t begin = mask.first_element(row), end = begin + static_cast<std::uint64_t>(operands.per_row);
    const std::uint64_t block = begin / 4 + static_cast<std::uint64_t>(map_first_pack<1>());
    if (block * 4 >= end) continue;
    const auto is_here = [&](int i) { return block * 4 + i >= begin && block * 4 + i < end; };
    const std::int64_t local = row * operands.per_row + static_cast<std::int64_t>(block * 4 - begin);  // of the block's first
    Wide<T> values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = is_here(i) ? to_wide(operands.x[local + i]) : 0;
    mask.apply(block, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!is_here(i)) continue;
      if (operands.residual != nullptr) values[i] += to_wide(operands.residual[local + i]);
      operands.out[local + i] = from_wide<T>(values[i]);
    }
  }
}

}  // namespace

void launch_dropout(const DropoutCall& call, StreamHandle stream) {
  if (call.rows == 0 || call.per_row == 0) return;
  const Mask mask = mask_of(call.mask);
  with_storage(call.dtype, [&]<class T>(T) {
    constexpr int kPack = kPerVector<T> < 4 ? 4 : kPerVector<T>;
    const Operands<T> operands{static_cast<const T*>(call.x), static_cast<const T*>(call.residual), static_cast<T*>(call.out),
                               call.rows, call.per_row};
    const auto rows = static_cast<unsigned>(call.rows < kMostRows ? call.rows : kMostRows);
    if (call.whole_blocks && call.per_row % kPack == 0 && are_aligned(operands.x, operands.residual, operands.out)) {
      dim3 grid = map_grid<kPack, 2>(call.per_row);
      grid.y = rows;
      if (operands.residual != nullptr) {
        launch(dropout_kernel<T, kPack, true>, grid, dim3(kMapThreads), 0, stream, operands, mask);
      } else {
        launch(dropout_kernel<T, kPack, false>, grid, dim3(kMapThreads), 0, stream, operands, mask);
      }
    } else {
      dim3 grid = map_grid<4, 1>(call.per_row + 3);  // a row that begins inside a block has one block more
      grid.y = rows;
      launch(dropout_blocks_kernel<T>, grid, dim3(kMapThreads), 0, stream, operands, mask);
    }
  });
}

}  // namespace tandem::TANDEM_GPU
