// SPDX-License-Identifier: Apache-2.0
// Blocks of bf16 and fp16 from and to fp32: the bits of core/dtype.h for every input. The machine's own bf16 conversion is not
// used, it takes subnormal numbers for zero; its fp16 conversion is, but for NaN, whose payload it treats in its own way.
#pragma once

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels/cpu/simd/vector_math.h"

namespace tandem::cpu {
namespace {

using Half = std::uint16_t;

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

#if defined(__AVX512F__)

constexpr Index kHalfBlock = 16;

inline __m512i constant(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
inline __m512i load_halves(const Half* from) {
  __m256i halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return _mm512_maskz_cvtepu16_epi32(0xFFFF, halves);
}
inline __m512 load_floats(const float* from) {
  __m512 value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

/// Indices of the upper words of 16 numbers.
inline __m512i upper_words() {
  return _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 31 << 16 | 29, 27 << 16 | 25, 23 << 16 | 21, 19 << 16 | 17, 15 << 16 | 13,
                          11 << 16 | 9, 7 << 16 | 5, 3 << 16 | 1);
}

struct Bf16 {  // the upper half of an fp32; rounded to nearest even, a NaN made quiet
  static inline void widen(const Half* from, float* to) {
    const __m512i bits = _mm512_maskz_slli_epi32(0xFFFF, load_halves(from), 16);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
  static inline void narrow(const float* from, Half* to) {
    const __m512 value = load_floats(from);
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, constant(0x10000));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_mask_blend_epi32(is_odd, constant(0x7FFF), constant(0x8000)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_or_epi32(rounded, is_nan, bits, constant(0x400000));
    // One permutation: cheaper than a shift and the narrowing move.
    const __m512i halves = _mm512_maskz_permutexvar_epi16(0xFFFFFFFFU, upper_words(), result);
    __builtin_memcpy(to, &halves, sizeof(__m256i));
  }
};

struct F16 {  // IEEE binary16, rounded to nearest even
  static inline void widen(const Half* from, float* to) {
    __m256i halves;
    __builtin_memcpy(&halves, from, sizeof(halves));
    const __m512 value = _mm512_maskz_cvtph_ps(0xFFFF, halves);
    const __m512i bits = load_halves(from);
    const __m512i payload = _mm512_maskz_slli_epi32(0xFFFF, _mm512_and_si512(bits, constant(0x3FF)), 13);
    const __m512i sign = _mm512_and_si512(_mm512_maskz_slli_epi32(0xFFFF, bits, 16), constant(0x80000000U));
    const __m512i nan = _mm512_or_si512(_mm512_or_si512(payload, sign), constant(0x7F800000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512 result = _mm512_mask_blend_ps(is_nan, value, _mm512_castsi512_ps(nan));
    __builtin_memcpy(to, &result, sizeof(result));
  }
  static inline void narrow(const float* from, Half* to) {
    const __m512 value = load_floats(from);
    const __m256i halves = _mm512_maskz_cvtps_ph(0xFFFF, value, _MM_FROUND_TO_NEAREST_INT);
    const __m256i sign = _mm256_and_si256(halves, _mm256_set1_epi16(static_cast<short>(0x8000)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m256i result = _mm256_mask_blend_epi16(is_nan, halves, _mm256_or_si256(sign, _mm256_set1_epi16(0x7E00)));
    __builtin_memcpy(to, &result, sizeof(result));
  }
};

#elif defined(__F16C__) && defined(__AVX2__)

constexpr Index kHalfBlock = 8;

inline __m256i constant(std::uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }
inline __m128i load_halves(const Half* from) {
  __m128i halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return halves;
}
inline __m256 load_floats(const float* from) {
  __m256 value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

struct Bf16 {  // the upper half of an fp32; rounded to nearest even, a NaN made quiet
  static inline void widen(const Half* from, float* to) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from)), 16);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
  static inline void narrow(const float* from, Half* to) {
    const __m256 value = load_floats(from);
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), constant(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, constant(0x7FFF)), last);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, constant(0x400000));
    const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
    __builtin_memcpy(to, &halves, sizeof(halves));
  }
};

struct F16 {  // IEEE binary16, rounded to nearest even
  static inline void widen(const Half* from, float* to) {
    const __m256 value = _mm256_cvtph_ps(load_halves(from));
    const __m256i bits = _mm256_cvtepu16_epi32(load_halves(from));
    const __m256i payload = _mm256_slli_epi32(_mm256_and_si256(bits, constant(0x3FF)), 13);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(bits, 16), constant(0x80000000U));
    const __m256i nan = _mm256_or_si256(_mm256_or_si256(payload, sign), constant(0x7F800000));
    const __m256 result = _mm256_blendv_ps(value, _mm256_castsi256_ps(nan), _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    __builtin_memcpy(to, &result, sizeof(result));
  }
  static inline void narrow(const float* from, Half* to) {
    const __m256 value = load_floats(from);
    const __m128i halves = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    const __m128i sign = _mm_and_si128(halves, _mm_set1_epi16(static_cast<short>(0x8000)));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m128i is_nan = _mm_packs_epi32(_mm256_castsi256_si128(unordered), _mm256_extracti128_si256(unordered, 1));
    const __m128i result = _mm_blendv_epi8(halves, _mm_or_si128(sign, _mm_set1_epi16(0x7E00)), is_nan);
    __builtin_memcpy(to, &result, sizeof(result));
  }
};

#else

constexpr Index kHalfBlock = 16;

struct Bf16 {  // the upper half of an fp32; rounded to nearest even, a NaN made quiet
  static inline void widen(const Half* from, float* to) {
#pragma omp simd
    for (Index i = 0; i < kHalfBlock; ++i) to[i] = float_of(std::uint32_t{from[i]} << 16);
  }
  static inline void narrow(const float* from, Half* to) {
#pragma omp simd
    for (Index i = 0; i < kHalfBlock; ++i) {
      const std::uint32_t bits = bits_of(from[i]);
      const std::uint32_t rounded = (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
      const std::uint32_t quiet = bits >> 16 | 0x40U;
      to[i] = static_cast<Half>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet : rounded);
    }
  }
};

struct F16 {  // IEEE binary16, rounded to nearest even
  static inline void widen(const Half* from, float* to) {
#pragma omp simd
    for (Index i = 0; i < kHalfBlock; ++i) {
      const std::uint32_t bits = from[i];
      const std::uint32_t sign = (bits & 0x8000U) << 16, exponent = bits & 0x7C00U, mantissa = bits & 0x3FFU;
      const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(mantissa)) * 0x1p-24F);
      const std::uint32_t normal = (exponent << 13 | mantissa << 13) + (112U << 23);
      const std::uint32_t special = 0x7F800000U | mantissa << 13;
      const std::uint32_t magnitude = exponent == 0 ? subnormal : (exponent == 0x7C00U ? special : normal);
      to[i] = float_of(sign | magnitude);
    }
  }
  static inline void narrow(const float* from, Half* to) {
#pragma omp simd
    for (Index i = 0; i < kHalfBlock; ++i) {
      const std::uint32_t bits = bits_of(from[i]);
      const std::uint32_t sign = bits >> 16 & 0x8000U, magnitude = bits & 0x7FFFFFFFU;
      // Adding 0.5 lets the FPU round what is below 2^-14; at 65520 a number rounds to infinity.
      const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5F) - 0x3F000000U;
      const std::uint32_t normal = (magnitude + 0xFFFU + (magnitude >> 13 & 1U) - 0x38000000U) >> 13;
      std::uint32_t result = magnitude < 0x38800000U ? subnormal : normal;
      result = magnitude >= 0x477FF000U ? 0x7C00U : result;
      result = magnitude > 0x7F800000U ? 0x7E00U : result;
      to[i] = static_cast<Half>(sign | result);
    }
  }
};

#endif

/// Calls block(i, count) for blocks of kHalfBlock elements, then for the rest.
template <class Body>
inline void for_half_blocks(Index count, Body block) {
  const Index whole = count / kHalfBlock * kHalfBlock;
  for (Index i = 0; i < whole; i += kHalfBlock) block(i, kHalfBlock);
  if (whole < count) block(whole, count - whole);
}

/// The block at `from`, of which there are `count` elements; zeros beyond.
template <class Format>
inline void widen_block(const Half* from, float* to, Index count) {
  if (count == kHalfBlock) {
    Format::widen(from, to);
  } else {
    Half last[kHalfBlock] = {};
    __builtin_memcpy(last, from, static_cast<std::size_t>(count) * sizeof(Half));
    Format::widen(last, to);
  }
}
template <class Format>
inline void narrow_block(const float* from, Half* to, Index count) {
  if (count == kHalfBlock) {
    Format::narrow(from, to);
  } else {
    Half last[kHalfBlock];
    Format::narrow(from, last);
    __builtin_memcpy(to, last, static_cast<std::size_t>(count) * sizeof(Half));
  }
}
inline void copy_block(const float* from, float* to, Index count) {
  if (count == kHalfBlock) {
    __builtin_memcpy(to, from, kHalfBlock * sizeof(float));
  } else {
    for (Index i = 0; i < kHalfBlock; ++i) to[i] = i < count ? from[i] : 0.0F;
  }
}

}  // namespace
}  // namespace tandem::cpu
