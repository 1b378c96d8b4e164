// SPDX-License-Identifier: Apache-2.0
// GELU and the vector operations around it.
#include "kernels/cuda/elementwise_kernels.h"

#include <cmath>

#include "kernels/cuda/map.cuh"
#include "kernels/cuda/rounding.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr double kTwoRootTwoOverPi = 2 * 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kHalfRoot = 0.70710678118654752440, kDensityAtZero = 0.39894228040143267794;
constexpr double kLog2OfE = 1.44269504088896340736;

template <class T>
inline constexpr bool kIsNarrow = sizeof(T) == 2;

// With 16 bits the instructions for 2^x and 1 / x do, whose errors are far below a rounding; they keep these kernels at the speed
// of memory. What they flush to zero doesn't show beside a one.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef TANDEM_SIMT
  return std::exp2(x);
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}
__device__ __forceinline__ float reciprocal(float x) {
#ifdef TANDEM_SIMT
  return 1.0F / x;
#else
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(x));
  return quotient;
#endif
}

/// e = exp(-2u) and s = 1 / (1 + e), 2u = 2 sqrt(2 / pi) (x + 0.044715 x^3).
template <class T>
struct Logistic {
  Wide<T> e, s;
};
template <class T>
__device__ __forceinline__ Logistic<T> logistic(Wide<T> x) {
  using Real = Wide<T>;
  constexpr double kFactor = kIsNarrow<T> ? -kLog2OfE : -1.0;
  const Real exponent = x * (Real(kFactor * kTwoRootTwoOverPi) + Real(kFactor * kTwoRootTwoOverPi * kCubic) * (x * x));
  if constexpr (kIsNarrow<T>) {
    const float e = power_of_two(exponent);
    return {e, reciprocal(1.0F + e)};
  } else {
    const Real e = exp(exponent);
    return {e, Real(1) / (Real(1) + e)};
  }
}

// 0.5 (1 + tanh(u)) = s, so that gelu(x) = x s.
template <class T>
struct Gelu {
  __device__ Wide<T> operator()(Wide<T> x) const { return x * logistic<T>(x).s; }
};
// gelu' = s + x s (1 - s) (2u)'. 1 - s is e s where that cancels nothing, and e may be infinite where it isn't used.
template <class T>
struct GeluBackward {
  __device__ Wide<T> operator()(Wide<T> dy, Wide<T> x) const {
    using Real = Wide<T>;
    const auto [e, s] = logistic<T>(x);
    const Real slope = Real(kTwoRootTwoOverPi) + Real(3 * kTwoRootTwoOverPi * kCubic) * (x * x);
    const Real rest = e <= Real(1) ? e * s : Real(1) - s;
    return dy * (s + x * slope * (s * rest));
  }
};
/// x Phi(x), a mistake to be found: in double, like the CPU's.
template <class T>
struct ErfGelu {
  __device__ Wide<T> operator()(Wide<T> x) const {
    const auto value = static_cast<double>(x);
    return static_cast<Wide<T>>(0.5 * value * (1.0 + erf(value * kHalfRoot)));
  }
};
template <class T>
struct ErfGeluBackward {
  __device__ Wide<T> operator()(Wide<T> dy, Wide<T> x) const {
    const auto value = static_cast<double>(x);
    const double slope = 0.5 * (1.0 + erf(value * kHalfRoot)) + value * kDensityAtZero * exp(-0.5 * value * value);
    return static_cast<Wide<T>>(static_cast<double>(dy) * slope);
  }
};

template <class T>
struct Sum {
  template <class Real>
  __device__ Wide<T> operator()(Real a, Wide<T> b) const {
    return a + b;
  }
};
template <class T>
struct Scale {
  Wide<T> factor;
  __device__ Wide<T> operator()(Wide<T> x) const { return x * factor; }
};

template <int kPack, class T>
__global__ void __launch_bounds__(kMapThreads) fill_kernel(T* x, std::int64_t count, double value) {
  constexpr int kUnroll = 4;
  const std::int64_t packs = count / kPack, first = map_first_pack<kUnroll>();
  Pack<T, kPack> filled{};
#pragma unroll
  for (int i = 0; i < kPack; ++i) filled.set(i, from_wide<T>(before_rounding<T>(value)));
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack < packs) store_pack(x + pack * kPack, filled);
  }
  map_tail<kPack>(count, [&](std::int64_t i) { x[i] = filled.get(0); });
}

/// A warp's worth of columns on x, rows on y; each block goes down a few rows, so that the bias is read once for them.
template <int kPack, class T>
__global__ void __launch_bounds__(kMapThreads) add_bias_kernel(const T* bias, T* x, std::int64_t tokens, std::int64_t width) {
  constexpr int kRows = 4;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (column >= width) return;
  const Pack<T, kPack> added = load_pack<kPack>(bias + column);
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * kRows; row < tokens;
       row += static_cast<std::int64_t>(gridDim.y) * kRows) {
    Pack<T, kPack> in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r < tokens) in[r] = load_pack<kPack>(x + (row + r) * width + column);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= tokens) continue;
      Wide<T> sums[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[i] = to_wide(in[r].get(i)) + to_wide(added.get(i));
      store_pack(x + (row + r) * width + column, pack_of<T>(sums));
    }
  }
}

template <int kPack, class T>
void launch_add_bias_of(const T* bias, T* x, std::int64_t tokens, std::int64_t width, StreamHandle stream) {
  constexpr std::int64_t kRows = 4, kMostRowBlocks = 32768;
  const std::int64_t columns = width / kPack, row_blocks = (tokens + kRows - 1) / kRows;
  int threads = 32;
  while (threads < kMapThreads && threads < columns) threads *= 2;
  const dim3 grid(static_cast<unsigned>((columns + threads - 1) / threads),
                  static_cast<unsigned>(row_blocks < kMostRowBlocks ? row_blocks : kMostRowBlocks));
  launch(add_bias_kernel<kPack, T>, grid, dim3(static_cast<unsigned>(threads)), 0, stream, bias, x, tokens, width);
}

}  // namespace

void launch_gelu_forward(DType dtype, GeluForm form, const void* x, void* y, std::int64_t count, StreamHandle stream) {
  with_storage(dtype, [&]<class T>(T) {
    const auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(y);
    if (count > 0 && form == GeluForm::erf) {
      launch(map_kernel<1, 1, T, T, ErfGelu<T>>, map_grid<1, 1>(count), dim3(kMapThreads), 0, stream, from, to, count,
             ErfGelu<T>{});
    } else {
      launch_map(from, to, count, Gelu<T>{}, stream);
    }
  });
}

void launch_gelu_backward(DType dtype, GeluForm form, const void* dy, const void* x, void* dx, std::int64_t count,
                          StreamHandle stream) {
  with_storage(dtype, [&]<class T>(T) {
    const auto *gradient = static_cast<const T*>(dy), *input = static_cast<const T*>(x);
    auto* to = static_cast<T*>(dx);
    if (count > 0 && form == GeluForm::erf) {
      launch(map_two_kernel<1, 1, T, T, T, ErfGeluBackward<T>>, map_grid<1, 1>(count), dim3(kMapThreads), 0, stream, gradient,
             input, to, count, ErfGeluBackward<T>{});
    } else {
      launch_map_two(gradient, input, to, count, GeluBackward<T>{}, stream);
    }
  });
}

void launch_add(DType x_dtype, const void* x, DType y_dtype, void* y, std::int64_t count, StreamHandle stream) {
  if (x_dtype == y_dtype) return launch_sum(x_dtype, x, y, y, count, stream);
  with_storage(x_dtype, [&]<class T>(T) {
    if constexpr (kIsNarrow<T>) {
      auto* sum = static_cast<float*>(y);
      launch_map_two(static_cast<const T*>(x), static_cast<const float*>(sum), sum, count, Sum<float>{}, stream);
    }
  });
}

void launch_sum(DType dtype, const void* a, const void* b, void* out, std::int64_t count, StreamHandle stream) {
  with_storage(dtype, [&]<class T>(T) {
    launch_map_two(static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(out), count, Sum<T>{}, stream);
  });
}

void launch_scale(DType dtype, void* x, double factor, std::int64_t count, StreamHandle stream) {
  with_storage(dtype, [&]<class T>(T) {
    auto* data = static_cast<T*>(x);
    launch_map(static_cast<const T*>(data), data, count, Scale<T>{static_cast<Wide<T>>(factor)}, stream);
  });
}

void launch_fill(DType dtype, void* x, double value, std::int64_t count, StreamHandle stream) {
  if (count == 0) return;
  with_storage(dtype, [&]<class T>(T) {
    auto* data = static_cast<T*>(x);
    if (are_aligned(data)) {
      launch(fill_kernel<kPerVector<T>, T>, map_grid<kPerVector<T>, 4>(count), dim3(kMapThreads), 0, stream, data, count, value);
    } else {
      launch(fill_kernel<1, T>, map_grid<1, 4>(count), dim3(kMapThreads), 0, stream, data, count, value);
    }
  });
}

void launch_add_bias(DType dtype, const void* bias, void* x, std::int64_t tokens, std::int64_t width, StreamHandle stream) {
  if (tokens == 0 || width == 0) return;
  with_storage(dtype, [&]<class T>(T) {
    const auto* added = static_cast<const T*>(bias);
    auto* data = static_cast<T*>(x);
    if (width % kPerVector<T> == 0 && are_aligned(added, data)) {
      launch_add_bias_of<kPerVector<T>>(added, data, tokens, width, stream);
    } else {
      launch_add_bias_of<1>(added, data, tokens, width, stream);
    }
  });
}

}  // namespace tandem::TANDEM_GPU
