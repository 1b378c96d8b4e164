// SPDX-License-Identifier: Apache-2.0
// From one floating dtype to another, and rounding to fp8.
#include <type_traits>

#include "kernels/cuda/elementwise_kernels.h"
#include "kernels/cuda/map.cuh"
#include "kernels/cuda/rounding.cuh"

namespace tandem::TANDEM_GPU {
namespace {

template <class To>
struct Convert {
  template <class Real>
  __device__ Wide<To> operator()(Real value) const {
    return before_rounding<To>(value);
  }
};

/// round_to_fp8() of core/dtype.h without branches. e4m3 has 3 mantissa bits and least normal exponent -6, e5m2 2 and -14.
template <int kMantissaBits, int kLeastExponent>
struct Fp8 {
  static constexpr float kMost = kMantissaBits == 3 ? 448.0F : 57344.0F;
  float scale, inverse;

  __device__ float operator()(float value) const {
    constexpr int kDropped = 23 - kMantissaBits;
    const unsigned bits = __float_as_uint(value * scale), absolute = bits & 0x7FFFFFFFU;
    const float scaled = __uint_as_float(absolute);
    // Below the least normal number the spacing is fixed: adding 2^23 of it rounds to it.
    const float shift = __uint_as_float(static_cast<unsigned>(127 + kLeastExponent - kMantissaBits + 23) << 23);
    const float least_normal = __uint_as_float(static_cast<unsigned>(127 + kLeastExponent) << 23);
    const unsigned half = (1U << (kDropped - 1)) - 1U + (absolute >> kDropped & 1U);
    const float normal = __uint_as_float((absolute + half) & ~((1U << kDropped) - 1U));
    const float rounded = scaled < least_normal ? (scaled + shift) - shift : normal;
    const float bounded = scaled >= kMost ? kMost : rounded;
    const float with_sign = __uint_as_float(__float_as_uint(bounded) | (bits & 0x80000000U));
    return scaled == scaled ? with_sign * inverse : value;
  }
};

/// The larger one; NaN is none.
__device__ __forceinline__ float larger(float most, float size) { return size > most ? size : most; }

/// The largest of a block in thread 0.
__device__ float block_largest(float most) {
  __shared__ float parts[kMapThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) most = larger(most, __shfl_xor_sync(0xFFFFFFFFU, most, distance));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kMapThreads / 32; ++warp) most = larger(most, parts[warp]);
  }
  return most;
}

constexpr int kQuantizeUnroll = 4;
constexpr std::int64_t kQuantizeBlock = std::int64_t{kMapThreads} * kQuantizeUnroll * 4;  // elements of a block, packed or not

template <int kPack, class From, class To, class F>
__global__ void __launch_bounds__(kMapThreads)
    quantize_kernel(const From* from, To* to, std::int64_t count, F round, float* partial) {
  constexpr int kUnroll = kQuantizeUnroll * 4 / kPack;
  const std::int64_t packs = count / kPack, first = map_first_pack<kUnroll>();
  float most = 0;
  const auto quantize = [&](From value) {
    const float wide_value = to_wide(value);
    most = larger(most, fabsf(wide_value));
    return round(wide_value);
  };
  Pack<From, kPack> in[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack < packs) in[u] = load_pack<kPack>(from + pack * kPack);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack >= packs) continue;
    float out[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) out[i] = quantize(in[u].get(i));
    store_pack(to + pack * kPack, pack_of<To>(out));
  }
  map_tail<kPack>(count, [&](std::int64_t i) { to[i] = from_wide<To>(quantize(from[i])); });
  most = block_largest(most);
  if (threadIdx.x == 0) partial[blockIdx.x] = most;
}

__global__ void __launch_bounds__(kMapThreads) largest_kernel(const float* partial, std::int64_t count, double* largest) {
  float most = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kMapThreads) most = larger(most, partial[i]);
  most = block_largest(most);
  if (threadIdx.x == 0) *largest = static_cast<double>(most);
}

template <class From, class To, class F>
void launch_quantize_of(const From* from, To* to, std::int64_t count, const F& round, float* partial, StreamHandle stream) {
  const dim3 grid(static_cast<unsigned>(quantize_partials(count)));
  if (are_aligned(from, to)) {
    launch(quantize_kernel<4, From, To, F>, grid, dim3(kMapThreads), 0, stream, from, to, count, round, partial);
  } else {
    launch(quantize_kernel<1, From, To, F>, grid, dim3(kMapThreads), 0, stream, from, to, count, round, partial);
  }
}

template <class F>
void launch_quantize(DType from_dtype, const void* from, DType to_dtype, void* to, std::int64_t count, const F& round,
                     float* partial, StreamHandle stream) {
  with_storage(from_dtype, [&]<class From>(From) {
    if constexpr (!std::is_same_v<From, double>) {
      const auto* source = static_cast<const From*>(from);
      if (to_dtype == DType::f32) {
        launch_quantize_of(source, static_cast<float*>(to), count, round, partial, stream);
      } else {
        launch_quantize_of(source, static_cast<bf16*>(to), count, round, partial, stream);
      }
    }
  });
}

}  // namespace

void launch_convert(DType from_dtype, const void* from, DType to_dtype, void* to, std::int64_t count, StreamHandle stream) {
  with_storage(from_dtype, [&]<class From>(From) {
    with_storage(to_dtype, [&]<class To>(To) {
      if constexpr (!std::is_same_v<From, To>) {
        launch_map(static_cast<const From*>(from), static_cast<To*>(to), count, Convert<To>{}, stream);
      }
    });
  });
}

std::int64_t quantize_partials(std::int64_t count) { return (count + kQuantizeBlock - 1) / kQuantizeBlock; }

void launch_quantize_fp8(DType from_dtype, const void* from, Fp8Format format, double scale, DType to_dtype, void* to,
                         std::int64_t count, float* partial, double* largest, StreamHandle stream) {
  if (count == 0) return;
  const auto factor = static_cast<float>(scale), inverse = static_cast<float>(1.0 / scale);
  if (format == Fp8Format::e4m3) {
    launch_quantize(from_dtype, from, to_dtype, to, count, Fp8<3, -6>{factor, inverse}, partial, stream);
  } else {
    launch_quantize(from_dtype, from, to_dtype, to, count, Fp8<2, -14>{factor, inverse}, partial, stream);
  }
  launch(largest_kernel, dim3(1), dim3(kMapThreads), 0, stream, static_cast<const float*>(partial), quantize_partials(count),
         largest);
}

}  // namespace tandem::TANDEM_GPU
