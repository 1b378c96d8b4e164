// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/rng.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_kernels.h"

namespace tandem::TANDEM_GPU {

/// The keys of Philox's ten rounds, made on the host: as kernel arguments they cost no instructions.
struct PhiloxRounds {
  std::uint32_t keys[10][2];
};

/// philox4x32() of core/rng.h for the counter of a mask: the words of elements [4 block, 4 block + 4).
struct MaskWords {
  PhiloxRounds rounds;
  std::uint32_t step, site;

  __device__ __forceinline__ uint4 operator()(std::uint64_t block) const {
    uint4 c = make_uint4(static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), step, site);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c.x, product1 = std::uint64_t{0xCD9E8D57U} * c.z;
      c = make_uint4(
          static_cast<std::uint32_t>(product1 >> 32) ^ c.y ^ rounds.keys[round][0], static_cast<std::uint32_t>(product1),
          static_cast<std::uint32_t>(product0 >> 32) ^ c.w ^ rounds.keys[round][1], static_cast<std::uint32_t>(product0));
    }
    return c;
  }
};
[[nodiscard]] inline MaskWords mask_words(const DropoutKey& key) {
  MaskWords words{{}, key.step, key.layer * 8 + static_cast<std::uint32_t>(key.site)};
  auto low = static_cast<std::uint32_t>(key.seed), high = static_cast<std::uint32_t>(key.seed >> 32);
  for (auto& pair : words.rounds.keys) {
    pair[0] = low;
    pair[1] = high;
    low += 0x9E3779B9U;
    high += 0xBB67AE85U;
  }
  return words;
}

/// MaskRows as kernels take it.
struct Mask {
  MaskWords words;
  std::uint32_t threshold;
  double keep_scale;
  const std::int64_t* row_ids;
  std::int64_t row_elements;

  __device__ __forceinline__ std::uint64_t first_element(std::int64_t row) const {
    return static_cast<std::uint64_t>(row_ids[row] * row_elements);
  }
  /// x / (1 - probability) of the four elements of a block where they are kept, else 0.
  template <class Real>
  __device__ __forceinline__ void apply(std::uint64_t block, Real* x) const {
    const uint4 drawn = words(block);
    const auto scale = static_cast<Real>(keep_scale);
    x[0] = drawn.x >= threshold ? x[0] * scale : Real(0);
    x[1] = drawn.y >= threshold ? x[1] * scale : Real(0);
    x[2] = drawn.z >= threshold ? x[2] * scale : Real(0);
    x[3] = drawn.w >= threshold ? x[3] * scale : Real(0);
  }
};
[[nodiscard]] inline Mask mask_of(const MaskRows& rows) {
  return {mask_words(rows.key), rows.threshold, rows.keep_scale, rows.row_ids, rows.row_elements};
}

}  // namespace tandem::TANDEM_GPU
