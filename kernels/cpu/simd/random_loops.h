// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

constexpr Index kMaskBlocks = 16;  // Philox blocks made side by side: one AVX-512 register of each counter word
constexpr Index kMaskWords = 4 * kMaskBlocks;

/// Words of the Philox blocks [first_block, first_block + kMaskBlocks), the function of core/rng.h.
inline void mask_words(const MaskKey& key, std::uint64_t first_block, std::uint32_t* __restrict words) {
  std::uint32_t c0[kMaskBlocks], c1[kMaskBlocks], c2[kMaskBlocks], c3[kMaskBlocks];
  for (Index i = 0; i < kMaskBlocks; ++i) {
    const std::uint64_t block = first_block + static_cast<std::uint64_t>(i);
    c0[i] = static_cast<std::uint32_t>(block);
    c1[i] = static_cast<std::uint32_t>(block >> 32);
    c2[i] = key.step;
    c3[i] = key.layer_site;
  }
  std::uint32_t key0 = key.seed_low, key1 = key.seed_high;
  for (int round = 0; round < 10; ++round) {
#pragma omp simd
    for (Index i = 0; i < kMaskBlocks; ++i) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c0[i];
      const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * c2[i];
      c0[i] = static_cast<std::uint32_t>(product1 >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<std::uint32_t>(product1);
      c2[i] = static_cast<std::uint32_t>(product0 >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<std::uint32_t>(product0);
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  for (Index i = 0; i < kMaskBlocks; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

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
  for_mask(mask, first, count, [&](const std::uint32_t* words, Index begin, Index end) {
    if (residual == nullptr) {
#pragma omp simd
      for (Index i = begin; i < end; ++i) out[i] = words[i - begin] >= mask.threshold ? x[i] * keep_scale : Real(0);
    } else {
#pragma omp simd
      for (Index i = begin; i < end; ++i) {
        out[i] = residual[i] + (words[i - begin] >= mask.threshold ? x[i] * keep_scale : Real(0));
      }
    }
  });
}

}  // namespace
}  // namespace tandem::cpu
