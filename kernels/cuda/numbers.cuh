// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#ifdef TANDEM_SIMT
#include "kernels/simt/numbers.h"
#else
#include "kernels/cuda/numbers_cuda.cuh"
#endif

namespace tandem::TANDEM_GPU {

/// What a kernel computes in where it stores T.
template <class T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <class T>
using Wide = typename WideOf<T>::type;

// Conversions from and to the storage types (bf16 and f16 of launch.cuh: bits, never computed with): those of core/dtype.h, bit
// for bit. to_wide(bf16), to_wide(f16) and the 16-bit halves of from_wide() are in the files above.
__device__ inline float to_wide(float value) { return value; }
__device__ inline double to_wide(double value) { return value; }

template <class T>
__device__ inline T from_wide(Wide<T> value) {
  if constexpr (sizeof(T) > 2) {
    return value;
  } else {
    return T{rounded_bits(value, T{})};
  }
}

/// Calls use(T{}) with the storage type of a floating dtype; throws ContractError for others.
template <class Use>
void with_storage(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::f64: return use(double{});
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: throw ContractError("a kernel for " + std::string(name(dtype)) + ": only floating-point storage");
  }
}

}  // namespace tandem::TANDEM_GPU
