// SPDX-License-Identifier: Apache-2.0
// Layer norm, forward; alone and behind dropout and residual.
#include "kernels/cuda/dropout_mask.cuh"
#include "kernels/cuda/norm_kernels.h"
#include "kernels/cuda/norm_rows.cuh"

namespace tandem::TANDEM_GPU {
namespace {

template <class T>
struct Forward {
  const T *weight, *bias;
  Wide<T> epsilon;
  T* y;
  Wide<T>*mean, *rstd;
  std::int64_t tokens;
  int hidden;
};

/// A row of x as it is.
template <class T>
struct PlainRow {
  static constexpr int kPack = kPerVector<T>;
  const T* x;
  using Raw = Pack<T, kPack>;
  __device__ Raw load(std::int64_t offset) const { return load_pack<kPack>(x + offset); }
  __device__ Pack<T, kPack> finish(const Raw& raw, std::int64_t, std::int64_t, int) const { return raw; }
};

/// A row of residual + dropout(x), which is stored on the way.
template <class T, bool kMasked>
struct DroppedRow {
  static constexpr int kPack = kPerVector<T>;
  const T *x, *residual;
  T* out;
  Mask mask;
  std::int64_t tokens_per_row;  // of the mask
  int hidden;

  struct Raw {
    Pack<T, kPack> x, residual;
  };
  __device__ Raw load(std::int64_t offset) const {
    Raw raw;
    raw.x = load_pack<kPack>(x + offset);
    if (residual != nullptr) raw.residual = load_pack<kPack>(residual + offset);
    return raw;
  }
  __device__ Pack<T, kPack> finish(const Raw& raw, std::int64_t token, std::int64_t offset, int column) const {
    float values[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = to_wide(raw.x.get(i));
    if constexpr (kMasked) {
      const std::int64_t row = token / tokens_per_row;
      const auto local = static_cast<std::uint64_t>((token - row * tokens_per_row) * hidden + column);
      const std::uint64_t block = (mask.first_element(row) + local) / 4;
#pragma unroll
      for (int part = 0; part < kPack / 4; ++part) mask.apply(block + static_cast<std::uint64_t>(part), values + 4 * part);
    }
    if (residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] += to_wide(raw.residual.get(i));
    }
    const Pack<T, kPack> result = pack_of<T>(values);
    store_pack(out + offset, result);
    return result;
  }
};

template <class T, bool kWarp, class Row>
__global__ void __launch_bounds__(kWarp ? kWarpRows * 32 : kMostThreads, kWarp ? 3 : 1)
    forward_kernel(Row source, Forward<T> norm) {
  constexpr int kPack = kPerVector<T>;
  __shared__ float places[2][kMostThreads / 32][1];
  const RowPlace place = row_place<kWarp>();
  if (place.row >= norm.tokens) return;
  const int packs = norm.hidden / kPack;
  const std::int64_t begin = place.row * norm.hidden;
  typename Row::Raw raw[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = place.first + p * place.step;
    if (pack < packs) raw[p] = source.load(begin + pack * kPack);
  }
  float x[kPacks][kPack];
  float sum[1] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = place.first + p * place.step;
    if (pack >= packs) continue;
    const Pack<T, kPack> row = source.finish(raw[p], place.row, begin + pack * kPack, pack * kPack);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      x[p][i] = to_wide(row.get(i));
      sum[0] += x[p][i];
    }
  }
  sum_over_row<kWarp>(sum, places[0]);
  const float mean = sum[0] / static_cast<float>(norm.hidden);
  sum[0] = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (place.first + p * place.step >= packs) continue;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      x[p][i] -= mean;
      sum[0] += x[p][i] * x[p][i];
    }
  }
  sum_over_row<kWarp>(sum, places[1]);
  const float rstd = reciprocal_root(sum[0] / static_cast<float>(norm.hidden) + norm.epsilon);
  if (place.first == 0) {
    norm.mean[place.row] = mean;
    norm.rstd[place.row] = rstd;
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (place.first + p * place.step) * kPack;
    if (column >= norm.hidden) continue;
    const Pack<T, kPack> weight = load_pack<kPack>(norm.weight + column), bias = load_pack<kPack>(norm.bias + column);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[p][i] = x[p][i] * rstd * to_wide(weight.get(i)) + to_wide(bias.get(i));
    store_pack(norm.y + begin + column, pack_of<T>(x[p]));
  }
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads) forward_plain_kernel(const T* x, Forward<T> norm) {
  using Real = Wide<T>;
  __shared__ Real places[2][kPlainThreads / 32][1];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x);
  const T* const from = x + row * norm.hidden;
  const int first = static_cast<int>(threadIdx.x);
  Real sum[1] = {};
  for (int c = first; c < norm.hidden; c += kPlainThreads) sum[0] += to_wide(from[c]);
  sum_over_row<false>(sum, places[0]);
  const Real mean = sum[0] / static_cast<Real>(norm.hidden);
  sum[0] = 0;
  for (int c = first; c < norm.hidden; c += kPlainThreads) {
    const Real difference = to_wide(from[c]) - mean;
    sum[0] += difference * difference;
  }
  sum_over_row<false>(sum, places[1]);
  const Real rstd = reciprocal_root(sum[0] / static_cast<Real>(norm.hidden) + norm.epsilon);
  if (first == 0) {
    norm.mean[row] = mean;
    norm.rstd[row] = rstd;
  }
  for (int c = first; c < norm.hidden; c += kPlainThreads) {
    const Real xhat = (to_wide(from[c]) - mean) * rstd;
    norm.y[row * norm.hidden + c] = from_wide<T>(xhat * to_wide(norm.weight[c]) + to_wide(norm.bias[c]));
  }
}

template <class T>
Forward<T> forward_of(const TokenRows& size, const NormForward& norm) {
  return {static_cast<const T*>(norm.weight),
          static_cast<const T*>(norm.bias),
          static_cast<Wide<T>>(norm.epsilon),
          static_cast<T*>(norm.y),
          static_cast<Wide<T>*>(norm.mean),
          static_cast<Wide<T>*>(norm.rstd),
          size.tokens,
          static_cast<int>(size.width)};
}
template <class T, class Row>
void launch_held(const RowLaunch& how, const Row& row, const Forward<T>& forward, StreamHandle stream) {
  if (how.by_warp) {
    launch(forward_kernel<T, true, Row>, how.grid, how.block, 0, stream, row, forward);
  } else {
    launch(forward_kernel<T, false, Row>, how.grid, how.block, 0, stream, row, forward);
  }
}

}  // namespace

void launch_layer_norm_forward(const TokenRows& size, const NormForward& norm, StreamHandle stream) {
  if (size.tokens == 0 || size.width == 0) return;
  with_storage(size.dtype, [&]<class T>(T) {
    const auto* x = static_cast<const T*>(norm.x);
    const Forward<T> forward = forward_of<T>(size, norm);
    const RowLaunch how = row_launch<T>(size.tokens, size.width, are_aligned(x, forward.weight, forward.bias, forward.y));
    if constexpr (sizeof(T) < 8) {
      if (how.held) return launch_held(how, PlainRow<T>{x}, forward, stream);
    }
    launch(forward_plain_kernel<T>, dim3(static_cast<unsigned>(size.tokens)), dim3(kPlainThreads), 0, stream, x, forward);
  });
}

bool launch_dropout_norm(const DropoutCall& dropout, const TokenRows& size, const NormForward& norm, StreamHandle stream) {
  if (size.tokens == 0 || size.width == 0) return true;
  if (!dropout.whole_blocks || size.dtype == DType::f64) return false;
  bool launched = false;
  with_storage(size.dtype, [&]<class T>(T) {
    if constexpr (sizeof(T) < 8) {
      const auto *x = static_cast<const T*>(dropout.x), *residual = static_cast<const T*>(dropout.residual);
      auto* out = static_cast<T*>(dropout.out);
      const Forward<T> forward = forward_of<T>(size, norm);
      const bool aligned = are_aligned(x, residual, out, forward.weight, forward.bias, forward.y);
      const RowLaunch how = row_launch<T>(size.tokens, size.width, aligned);
      if (!how.held) return;
      launched = true;
      const std::int64_t tokens_per_row = dropout.per_row / size.width;
      if (dropout.mask.row_ids != nullptr) {
        const DroppedRow<T, true> row{x, residual, out, mask_of(dropout.mask), tokens_per_row, forward.hidden};
        launch_held(how, row, forward, stream);
      } else {
        const DroppedRow<T, false> row{x, residual, out, mask_of(dropout.mask), tokens_per_row, forward.hidden};
        launch_held(how, row, forward, stream);
      }
    }
  });
  return launched;
}

}  // namespace tandem::TANDEM_GPU
