// SPDX-License-Identifier: Apache-2.0
// Rounding to fp8: core/dtype.h, round_to_fp8(), without branches.
#pragma once

#include "kernels/cpu/simd/half_formats.h"
#include "kernels/cpu/simd/vector_math.h"

namespace tandem::cpu {
namespace {

/// to = fp8(from * scale) / scale; returns the largest |from|, NaN left out. kMantissaBits of e4m3 are 3, kLeastExponent -6.
template <int kMantissaBits, int kLeastExponent>
inline float quantize(const float* from, float scale, float inverse_scale, float most, float* to, Index count) {
  constexpr int kDropped = 23 - kMantissaBits;
  // Below the least normal number the spacing is fixed: adding 2^23 of it rounds to it.
  const float shift = float_of(static_cast<std::uint32_t>(127 + kLeastExponent - kMantissaBits + 23) << 23);
  const float least_normal = float_of(static_cast<std::uint32_t>(127 + kLeastExponent) << 23);
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (Index i = 0; i < count; ++i) {
    const float size = magnitude(from[i]);
    largest = size > largest ? size : largest;
    const std::uint32_t bits = bits_of(from[i] * scale);
    const std::uint32_t absolute = bits & 0x7FFFFFFFU;
    const float scaled = float_of(absolute);
    const std::uint32_t half = (1U << (kDropped - 1)) - 1U + (absolute >> kDropped & 1U);
    const float normal = float_of((absolute + half) & ~((1U << kDropped) - 1U));
    const float rounded = scaled < least_normal ? (scaled + shift) - shift : normal;
    const float bounded = scaled >= most ? most : rounded;
    const float signed_value = float_of(bits_of(bounded) | (bits & 0x80000000U));
    to[i] = scaled == scaled ? signed_value * inverse_scale : from[i];
  }
  return largest;
}

float quantize_e4m3(const float* from, float scale, float inverse_scale, float* to, Index count) {
  return quantize<3, -6>(from, scale, inverse_scale, 448.0F, to, count);
}
float quantize_e5m2(const float* from, float scale, float inverse_scale, float* to, Index count) {
  return quantize<2, -14>(from, scale, inverse_scale, 57344.0F, to, count);
}

}  // namespace
}  // namespace tandem::cpu
