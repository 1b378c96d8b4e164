// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"

// The part of numbers.cuh that is a GPU's.
namespace tandem::cuda_gpu {

__device__ inline float to_wide(bf16 value) { return __uint_as_float(std::uint32_t{value.bits} << 16); }

/// The instruction makes every NaN the same one; core/dtype.h keeps which it was. A select, no branch.
__device__ inline float to_wide(f16 value) {
  const float converted = __half2float(__ushort_as_half(value.bits));
  const std::uint32_t kept =
      (std::uint32_t{value.bits} & 0x8000U) << 16 | 0x7F800000U | (std::uint32_t{value.bits} & 0x3FFU) << 13;
  return (value.bits & 0x7FFFU) > 0x7C00U ? __uint_as_float(kept) : converted;
}

__device__ inline std::uint16_t rounded_bits(float value, bf16) {
  const std::uint16_t rounded = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  return value != value ? static_cast<std::uint16_t>(__float_as_uint(value) >> 16 | 0x40U) : rounded;
}
__device__ inline std::uint16_t rounded_bits(float value, f16) {
  const std::uint16_t rounded = __half_as_ushort(__float2half_rn(value));
  return value != value ? static_cast<std::uint16_t>((__float_as_uint(value) >> 16 & 0x8000U) | 0x7E00U) : rounded;
}

}  // namespace tandem::cuda_gpu
