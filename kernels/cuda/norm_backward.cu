// SPDX-License-Identifier: Apache-2.0
// Layer norm, gradient of its input.
#include "kernels/cuda/norm_kernels.h"
#include "kernels/cuda/norm_rows.cuh"

namespace tandem::TANDEM_GPU {
namespace {

template <class T>
struct Backward {
  const T *dy, *x, *weight, *dresidual;  // dresidual may be null, or dx
  const Wide<T>*mean, *rstd;
  T* dx;
  std::int64_t tokens;
  int hidden;
};

template <class T, bool kWarp, bool kResidual>
__global__ void __launch_bounds__(kWarp ? kWarpRows * 32 : kMostThreads, kWarp ? 3 : 1) backward_kernel(Backward<T> norm) {
  constexpr int kPack = kPerVector<T>;
  __shared__ float places[kMostThreads / 32][2];
  const RowPlace place = row_place<kWarp>();
  if (place.row >= norm.tokens) return;
  const int packs = norm.hidden / kPack;
  const std::int64_t begin = place.row * norm.hidden;
  Pack<T, kPack> dy[kPacks], x[kPacks], residual[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = place.first + p * place.step;
    if (pack >= packs) continue;
    dy[p] = load_pack<kPack>(norm.dy + begin + pack * kPack);
    x[p] = load_pack<kPack>(norm.x + begin + pack * kPack);
    if constexpr (kResidual) residual[p] = load_pack<kPack>(norm.dresidual + begin + pack * kPack);
  }
  const float mean = norm.mean[place.row], rstd = norm.rstd[place.row];
  float sums[2] = {};  // of g and g xhat
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = place.first + p * place.step;
    if (pack >= packs) continue;
    const Pack<T, kPack> weight = load_pack<kPack>(norm.weight + pack * kPack);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float g = to_wide(dy[p].get(i)) * to_wide(weight.get(i));
      sums[0] += g;
      sums[1] += g * ((to_wide(x[p].get(i)) - mean) * rstd);
    }
    keep_packed(dy[p]);
    keep_packed(x[p]);
  }
  sum_over_row<kWarp>(sums, places);
  const float mean_g = sums[0] / static_cast<float>(norm.hidden), mean_gx = sums[1] / static_cast<float>(norm.hidden);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = place.first + p * place.step;
    if (pack >= packs) continue;
    const Pack<T, kPack> weight = load_pack<kPack>(norm.weight + pack * kPack);  // near by now
    float result[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float g = to_wide(dy[p].get(i)) * to_wide(weight.get(i));
      const float xhat = (to_wide(x[p].get(i)) - mean) * rstd;
      float dx = rstd * (g - mean_g - xhat * mean_gx);
      if constexpr (kResidual) dx += to_wide(residual[p].get(i));
      result[i] = dx;
    }
    store_pack(norm.dx + begin + pack * kPack, pack_of<T>(result));
  }
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads) backward_plain_kernel(Backward<T> norm) {
  using Real = Wide<T>;
  __shared__ Real places[kPlainThreads / 32][2];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x), begin = row * norm.hidden;
  const Real mean = norm.mean[row], rstd = norm.rstd[row];
  Real sums[2] = {};
  for (int c = static_cast<int>(threadIdx.x); c < norm.hidden; c += kPlainThreads) {
    const Real g = to_wide(norm.dy[begin + c]) * to_wide(norm.weight[c]);
    sums[0] += g;
    sums[1] += g * ((to_wide(norm.x[begin + c]) - mean) * rstd);
  }
  sum_over_row<false>(sums, places);
  const Real mean_g = sums[0] / static_cast<Real>(norm.hidden), mean_gx = sums[1] / static_cast<Real>(norm.hidden);
  for (int c = static_cast<int>(threadIdx.x); c < norm.hidden; c += kPlainThreads) {
    const Real g = to_wide(norm.dy[begin + c]) * to_wide(norm.weight[c]);
    const Real xhat = (to_wide(norm.x[begin + c]) - mean) * rstd;
    Real dx = rstd * (g - mean_g - xhat * mean_gx);
    if (norm.dresidual != nullptr) dx += to_wide(norm.dresidual[begin + c]);
    norm.dx[begin + c] = from_wide<T>(dx);
  }
}

template <class T, bool kResidual>
void launch_held(const RowLaunch& how, const Backward<T>& backward, StreamHandle stream) {
  if (how.by_warp) {
    launch(backward_kernel<T, true, kResidual>, how.grid, how.block, 0, stream, backward);
  } else {
    launch(backward_kernel<T, false, kResidual>, how.grid, how.block, 0, stream, backward);
  }
}

}  // namespace

void launch_layer_norm_backward_input(const TokenRows& size, const NormBackwardInput& norm, StreamHandle stream) {
  if (size.tokens == 0 || size.width == 0) return;
  with_storage(size.dtype, [&]<class T>(T) {
    const Backward<T> backward{static_cast<const T*>(norm.dy),
                               static_cast<const T*>(norm.x),
                               static_cast<const T*>(norm.weight),
                               static_cast<const T*>(norm.dresidual),
                               static_cast<const Wide<T>*>(norm.mean),
                               static_cast<const Wide<T>*>(norm.rstd),
                               static_cast<T*>(norm.dx),
                               size.tokens,
                               static_cast<int>(size.width)};
    if constexpr (sizeof(T) < 8) {
      const bool aligned = are_aligned(backward.dy, backward.x, backward.weight, backward.dresidual, backward.dx);
      const RowLaunch how = row_launch<T>(size.tokens, size.width, aligned);
      if (how.held && norm.dresidual != nullptr) return launch_held<T, true>(how, backward, stream);
      if (how.held) return launch_held<T, false>(how, backward, stream);
    }
    launch(backward_plain_kernel<T>, dim3(static_cast<unsigned>(size.tokens)), dim3(kPlainThreads), 0, stream, backward);
  });
}

}  // namespace tandem::TANDEM_GPU
