// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/numbers.cuh"

namespace tandem::TANDEM_GPU {

/// What from_wide<T>() rounds to the T nearest to `value`. For a double and 16 bits: the fp32 number cut off, with the last bit
/// set where something was cut off. Rounding to the nearest fp32 first could make a tie of what is none.
template <class T>
__device__ __forceinline__ Wide<T> before_rounding(double value) {
  if constexpr (sizeof(T) > 2) {
    return static_cast<Wide<T>>(value);
  } else {
    const auto nearest = static_cast<float>(value);
    if (value != value || static_cast<double>(nearest) == value) return nearest;
    auto bits = __float_as_uint(nearest);
    if (fabs(static_cast<double>(nearest)) > fabs(value)) --bits;
    return __uint_as_float(bits | 1U);
  }
}
template <class T>
__device__ __forceinline__ Wide<T> before_rounding(float value) {
  return static_cast<Wide<T>>(value);
}

}  // namespace tandem::TANDEM_GPU
