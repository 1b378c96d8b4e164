// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/compression_kernels.h"
#include "kernels/cuda/gpu.h"

namespace tandem::TANDEM_GPU {

/// CodeCall with sizes taken apart; residual and new_residual may be null.
struct CodeArrays {
  const float* gradient = nullptr;
  const float* residual = nullptr;
  float* new_residual = nullptr;
  std::byte* payload = nullptr;
  std::int64_t elements = 0;
  std::int32_t* refused = nullptr;
};

void launch_quantize(int bits, std::int64_t block, const CodeArrays& arrays, StreamHandle stream);
void launch_dequantize(int bits, std::int64_t block, const std::byte* payload, Decode decode, float* out, std::int64_t elements,
                       StreamHandle stream);
void launch_pack_signs(std::int64_t block, const CodeArrays& arrays, StreamHandle stream);
void launch_unpack_signs(std::int64_t block, const std::byte* payload, Decode decode, float* out, std::int64_t elements,
                         StreamHandle stream);

// Top-K, in top_k.cu.

/// Elements that a block counts, and finds places for, at once.
inline constexpr std::int64_t kTopKTile = 2048;
/// What the launches of one selection share, on the device.
struct TopKState {
  std::int32_t histograms[3][2048];  ///< zero before
  std::int32_t threshold_bits;       ///< leading digits found so far of the k-th largest magnitude; zero before
  std::int32_t wanted;               ///< how many of its rank among those with these digits; k before
};
/// Chosen and equal elements of each tile, [tiles] each; then the sums of all tiles before it.
struct TopKTiles {
  std::int32_t* above = nullptr;
  std::int32_t* equal = nullptr;
};
/// new_residual = gradient + residual and the first histogram; `refused` where that is not finite. The payload is not touched.
void launch_form(const CodeArrays& arrays, TopKState* state, StreamHandle stream);
/// Finds the k-th largest magnitude of c [elements], digit by digit, after launch_form().
void launch_find_threshold(const float* c, std::int64_t elements, TopKState* state, StreamHandle stream);
/// Writes the payload, and zeros to new_residual (null: none) where elements were taken.
void launch_take(const float* c, std::int64_t elements, std::int64_t k, const TopKState* state, const TopKTiles& tiles,
                 std::byte* payload, float* new_residual, StreamHandle stream);
void launch_scatter(std::int64_t k, const std::byte* payload, Decode decode, float* out, std::int64_t elements,
                    std::int32_t* refused, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU
