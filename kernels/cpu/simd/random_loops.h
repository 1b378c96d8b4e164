// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

/// Lanes of 64 bits that hold one 32-bit word each; what is in the upper halves does not matter.
typedef std::uint64_t WordLanes __attribute__((vector_size(kVectorBytes)));
constexpr Index kWordLanes = kVectorBytes / 8;

/// 64-bit products of the lanes' lower halves. Compilers make a full 64 x 64-bit product of the plain expression: three times the
/// work.
inline WordLanes multiply_words(WordLanes a, WordLanes b) {
#if defined(__AVX512F__)
  return (WordLanes)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);  // g++ 12 warns of the plain one's own header
#elif defined(__AVX2__)
  return (WordLanes)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (WordLanes)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU);
#endif
}

constexpr Index kMaskBlocks = 16;  // Philox blocks made at a time
constexpr Index kMaskWords = 4 * kMaskBlocks;

/// Words of the Philox blocks [first_block, first_block + kMaskBlocks), the function of core/rng.h, one block a lane.
inline void mask_words(const MaskKey& key, std::uint64_t first_block, std::uint32_t* __restrict words) {
  constexpr Index kGroups = kMaskBlocks / kWordLanes;
  WordLanes c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
  std::uint64_t blocks[kMaskBlocks];
  for (Index i = 0; i < kMaskBlocks; ++i) blocks[i] = first_block + static_cast<std::uint64_t>(i);
  __builtin_memcpy(c0, blocks, sizeof(blocks));
  for (Index g = 0; g < kGroups; ++g) {
    c1[g] = c0[g] >> 32;
    c2[g] = WordLanes{} + key.step;
    c3[g] = WordLanes{} + key.layer_site;
  }
  std::uint32_t key0 = key.seed_low, key1 = key.seed_high;
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 8
    for (Index g = 0; g < kGroups; ++g) {
      const WordLanes product0 = multiply_words(c0[g], WordLanes{} + 0xD2511F53U);
      const WordLanes product1 = multiply_words(c2[g], WordLanes{} + 0xCD9E8D57U);
      c0[g] = (product1 >> 32) ^ c1[g] ^ (WordLanes{} + key0);
      c1[g] = product1;
      c2[g] = (product0 >> 32) ^ c3[g] ^ (WordLanes{} + key1);
      c3[g] = product0;
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  for (Index g = 0; g < kGroups; ++g) {
    const WordLanes first = (c0[g] & 0xFFFFFFFFU) | (c1[g] << 32), second = (c2[g] & 0xFFFFFFFFU) | (c3[g] << 32);
    for (Index i = 0; i < kWordLanes; ++i) {
      const std::uint64_t pairs[2] = {first[i], second[i]};
      __builtin_memcpy(words + 4 * (g * kWordLanes + i), pairs, sizeof(pairs));
    }
  }
}
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of words are copied as 64-bit numbers");

/// Calls apply(words, begin, end) for pieces [begin, end) of the elements [0, count): words[i - begin] decides element first + i.
template <class Apply>
inline void for_mask(const MaskKey& key, std::uint64_t first, Index count, Apply apply) {
  alignas(64) std::uint32_t words[kMaskWords];
  for (Index begin = 0; begin < count;) {
    const std::uint64_t element = first + static_cast<std::uint64_t>(begin);
    const auto skipped = static_cast<Index>(element % 4);
    const Index available = kMaskWords - skipped;
    const Index end = count - begin < available ? count : begin + available;
    mask_words(key, element / 4, words);
    apply(words + skipped, begin, end);
    begin = end;
  }
}

template <class Real>
void dropout(const MaskKey& mask, std::uint64_t first, Real keep_scale, const Real* x, const Real* residual, Real* out,
             Index count) {
  const std::uint32_t threshold = mask.threshold;
  for_mask(mask, first, count, [&](const std::uint32_t* words, Index begin, Index end) {
    if (residual == nullptr) {
#pragma omp simd
      for (Index i = begin; i < end; ++i) out[i] = words[i - begin] >= threshold ? x[i] * keep_scale : Real(0);
    } else {
#pragma omp simd
      for (Index i = begin; i < end; ++i) {
        out[i] = residual[i] + (words[i - begin] >= threshold ? x[i] * keep_scale : Real(0));
      }
    }
  });
}

}  // namespace
}  // namespace tandem::cpu
