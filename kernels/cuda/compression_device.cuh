// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/compression_kernels.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector_access.cuh"

/// What the kernels of the codes share.
namespace tandem::TANDEM_GPU {

/// Bits of |x| from here on: infinity, NaN.
inline constexpr std::int32_t kInfinityBits = 0x7F800000;

/// Order of the result is that of magnitudes, with infinity and then NaN above all numbers.
__device__ inline std::int32_t magnitude_bits(float value) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU);
}

/// a b rounded by itself, never fused with a sum that it goes into.
__device__ inline float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__device__ inline float corrected(const CodeArrays& arrays, std::int64_t i) {
  return arrays.residual != nullptr ? arrays.gradient[i] + arrays.residual[i] : arrays.gradient[i];
}

/// The first `count` of four neighbours, in one access where there are four and they are aligned; other values stay.
__device__ inline void load_floats(const float* from, float (&values)[4], int count) {
  if (count == 4 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    const Pack<float, 4> pack = load_pack<4>(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = pack.get(j);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < count) values[j] = from[j];
  }
}
__device__ inline void store_floats(float* to, const float (&values)[4], int count) {
  if (count == 4 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    Pack<float, 4> pack;
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.set(j, values[j]);
    store_pack(to, pack);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < count) to[j] = values[j];
  }
}

/// gradient + residual of up to four elements from `first` on, of `left` that there are; returns how many, the rest is zero.
__device__ inline int load_corrected(const CodeArrays& arrays, std::int64_t first, std::int64_t left, float (&c)[4]) {
  const int count = left < 4 ? static_cast<int>(left) : 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) c[j] = 0.0F;
  load_floats(arrays.gradient + first, c, count);
  if (arrays.residual != nullptr) {
    float residual[4] = {};
    load_floats(arrays.residual + first, residual, count);
#pragma unroll
    for (int j = 0; j < 4; ++j) c[j] = c[j] + residual[j];
  }
  return count;
}

// Payloads lie at any address.
__device__ inline bool is_word_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 4 == 0; }
__device__ inline void store_word(std::byte* to, std::uint32_t word) {
  if (is_word_aligned(to)) {
    *reinterpret_cast<std::uint32_t*>(to) = word;
    return;
  }
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(word >> (8 * i) & 0xFFU);
}
__device__ inline std::uint32_t load_word(const std::byte* from) {
  if (is_word_aligned(from)) return *reinterpret_cast<const std::uint32_t*>(from);
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return word;
}

}  // namespace tandem::TANDEM_GPU
