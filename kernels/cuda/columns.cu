// SPDX-License-Identifier: Apache-2.0
// Sums over tokens: gradients of biases and of layer norm's weights. Step one: a block sums a run of tokens for one tile of
// columns, each warp every eighth token, a lane its own columns. Step two: what the blocks of a tile left is added up in their
// order. How tokens are cut hangs on the sizes alone.
#include "kernels/cuda/norm_kernels.h"
#include "kernels/cuda/vector_access.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kWarps = 8;
constexpr std::int64_t kTargetBlocks = 512;  // about four of an H200's multiprocessor
constexpr std::int64_t kLeastRows = 4 * kWarps;
constexpr std::int64_t kMostPack = 8;

struct Cut {
  std::int64_t chunks, rows_per_chunk;
};
Cut cut(std::int64_t tokens, std::int64_t columns) {
  const std::int64_t tiles = (columns + 32 * kMostPack - 1) / (32 * kMostPack);
  const std::int64_t wanted = kTargetBlocks / tiles > 1 ? kTargetBlocks / tiles : 1;
  const std::int64_t most = (tokens + kLeastRows - 1) / kLeastRows;
  const std::int64_t chunks = wanted < most ? wanted : most;
  const std::int64_t rows = (tokens + chunks - 1) / chunks;
  return {(tokens + rows - 1) / rows, rows};
}

template <class T>
struct ColumnOperands {
  const T *dy, *x;
  const Wide<T>*mean, *rstd;
  std::int64_t tokens, columns, rows_per_chunk;
};

/// The first step. partial [chunks, kNorm ? 2 : 1, columns]: sums of dy * xhat, then of dy; or of dy alone.
template <class T, int kPack, bool kNorm>
__global__ void __launch_bounds__(kWarps * 32) column_partials_kernel(ColumnOperands<T> in, Wide<T>* partial) {
  using Real = Wide<T>;
  constexpr int kUnroll = 4, kSums = kNorm ? 2 : 1, kTile = 32 * kPack;
  __shared__ Real shared[kWarps][kSums][kTile + kPack];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kTile, column = tile + lane * kPack;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * in.rows_per_chunk;
  const std::int64_t end = begin + in.rows_per_chunk < in.tokens ? begin + in.rows_per_chunk : in.tokens;

  Real sums[kSums][kPack] = {};
  for (std::int64_t row = begin + warp; row < end && column < in.columns; row += kUnroll * kWarps) {
    Pack<T, kPack> dy[kUnroll], x[kUnroll];
    Real mean[kUnroll], rstd[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t r = row + u * kWarps;
      if (r >= end) continue;
      dy[u] = load_pack<kPack>(in.dy + r * in.columns + column);
      if constexpr (kNorm) {
        x[u] = load_pack<kPack>(in.x + r * in.columns + column);
        mean[u] = in.mean[r];
        rstd[u] = in.rstd[r];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (row + u * kWarps >= end) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const Real gradient = to_wide(dy[u].get(i));
        sums[kSums - 1][i] += gradient;
        if constexpr (kNorm) sums[0][i] += gradient * ((to_wide(x[u].get(i)) - mean[u]) * rstd[u]);
      }
    }
  }
  // [element][lane], rows of one more than a warp: neither the stores nor the loads meet in a bank.
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) shared[warp][s][i * 33 + lane] = sums[s][i];
  }
  __syncthreads();
  for (int j = static_cast<int>(threadIdx.x); j < kSums * kTile; j += kWarps * 32) {
    const int s = j / kTile, c = j % kTile;
    if (tile + c >= in.columns) continue;
    Real sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][s][c % kPack * 33 + c / kPack];
    partial[(static_cast<std::int64_t>(blockIdx.y) * kSums + s) * in.columns + tile + c] = sum;
  }
}

/// The second step: 32 columns of a block, warp w sums chunks w, w + 8, ... `count` is kSums * columns; the first `columns` sums
/// go to `first`, later ones to `second`.
template <class Real, class Sum>
__global__ void __launch_bounds__(kWarps * 32) add_partials_kernel(const Real* partial, std::int64_t chunks, std::int64_t count,
                                                                   std::int64_t columns, Sum* first, Sum* second) {
  __shared__ Real shared[kWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  Real sum = 0;
  if (column < count) {
#pragma unroll 4
    for (std::int64_t chunk = warp; chunk < chunks; chunk += kWarps) sum += partial[chunk * count + column];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= count) return;
  sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += shared[w][lane];
  Sum* const to = column < columns ? first + column : second + (column - columns);
  *to = from_wide<Sum>(to_wide(*to) + sum);
}

template <class T, class Sum, bool kNorm>
void launch_both(const ColumnOperands<T>& in, Sum* first, Sum* second, Wide<T>* partial, StreamHandle stream) {
  constexpr int kPack = kPerVector<T>;
  const std::int64_t chunks = cut(in.tokens, in.columns).chunks, count = in.columns * (kNorm ? 2 : 1);
  const auto grid = [&](int pack) {
    return dim3(static_cast<unsigned>((in.columns + 32 * pack - 1) / (32 * pack)), static_cast<unsigned>(chunks));
  };
  if (in.columns % kPack == 0 && are_aligned(in.dy, in.x)) {
    launch(column_partials_kernel<T, kPack, kNorm>, grid(kPack), dim3(kWarps * 32), 0, stream, in, partial);
  } else {
    launch(column_partials_kernel<T, 1, kNorm>, grid(1), dim3(kWarps * 32), 0, stream, in, partial);
  }
  launch(add_partials_kernel<Wide<T>, Sum>, dim3(static_cast<unsigned>((count + 31) / 32)), dim3(kWarps * 32), 0, stream,
         static_cast<const Wide<T>*>(partial), chunks, count, in.columns, first, second);
}

template <bool kNorm, class T>
void launch_sums(const ColumnOperands<T>& in, DType sums, void* first, void* second, void* partial, StreamHandle stream) {
  auto* const room = static_cast<Wide<T>*>(partial);
  if constexpr (sizeof(T) == 2) {
    if (sums == DType::f32) {
      launch_both<T, float, kNorm>(in, static_cast<float*>(first), static_cast<float*>(second), room, stream);
      return;
    }
  }
  launch_both<T, T, kNorm>(in, static_cast<T*>(first), static_cast<T*>(second), room, stream);
}

}  // namespace

std::int64_t column_partials(std::int64_t tokens, std::int64_t columns) {
  return tokens == 0 || columns == 0 ? 0 : 2 * columns * cut(tokens, columns).chunks;
}

void launch_layer_norm_backward_weight(const TokenRows& size, const NormBackwardWeight& norm, void* partial,
                                       StreamHandle stream) {
  if (size.tokens == 0 || size.width == 0) return;
  with_storage(size.dtype, [&]<class T>(T) {
    const ColumnOperands<T> in{static_cast<const T*>(norm.dy),
                               static_cast<const T*>(norm.x),
                               static_cast<const Wide<T>*>(norm.mean),
                               static_cast<const Wide<T>*>(norm.rstd),
                               size.tokens,
                               size.width,
                               cut(size.tokens, size.width).rows_per_chunk};
    launch_sums<true>(in, norm.sums, norm.dweight, norm.dbias, partial, stream);
  });
}

void launch_column_sum(const TokenRows& size, const void* dy, DType sums, void* dbias, void* partial, StreamHandle stream) {
  if (size.tokens == 0 || size.width == 0) return;
  with_storage(size.dtype, [&]<class T>(T) {
    const ColumnOperands<T> in{static_cast<const T*>(dy),
                               nullptr,
                               nullptr,
                               nullptr,
                               size.tokens,
                               size.width,
                               cut(size.tokens, size.width).rows_per_chunk};
    launch_sums<false>(in, sums, dbias, nullptr, partial, stream);
  });
}

}  // namespace tandem::TANDEM_GPU
