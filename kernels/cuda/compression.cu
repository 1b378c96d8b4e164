// SPDX-License-Identifier: Apache-2.0
// Codes with a scale per block of elements. A group of threads takes one block: it looks through the elements once for the scale
// and once, out of the cache, for the codes. Products and sums are kept apart where the compiler would fuse them: the bits are
// those of the codecs on the CPU.
#include <bit>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/compression_device.cuh"
#include "kernels/cuda/compression_kernels.h"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256;
constexpr int kFour = 4;        // neighbouring elements of a thread
constexpr int kSignLanes = 16;  // sums of which the mean magnitude is made, as the codec states
constexpr std::int64_t kWarpBlock = 2048;

// Adding it to |x| < 2^22 leaves x, rounded half to even, in the low bits.
constexpr float kRounder = 0x1.8p23F;

struct Layout {
  std::int64_t elements, block, blocks, code_bytes;  // code_bytes: of a whole block

  [[nodiscard]] __device__ std::int64_t count_of(std::int64_t index) const {
    const std::int64_t left = elements - index * block;
    return left < block ? left : block;
  }
  /// Of a payload: scales, then codes.
  [[nodiscard]] __device__ std::int64_t scale_at(std::int64_t index) const { return 4 * index; }
  [[nodiscard]] __device__ std::int64_t codes_at(std::int64_t index) const { return 4 * blocks + index * code_bytes; }
};

template <int kGroup>
__device__ std::int64_t group_index() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kGroup;
}

template <int kGroup>
__device__ std::int32_t group_max(std::int32_t value) {
  if constexpr (kGroup == kWarpSize) return warp_max(value);
  return block_max(value);
}

/// Codes of `count` elements, of four with zeros behind them; four bytes at a word's address go out in one access.
template <int kBits>
__device__ void store_codes(std::byte* to, const std::int32_t (&q)[kFour], int count) {
  std::uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    const std::uint32_t code = static_cast<std::uint32_t>(q[j]) & (kBits == 8 ? 0xFFU : 0x0FU);
    word |= code << (kBits * j);
  }
  const int bytes = kBits == 8 ? count : (count + 1) / 2;
  if (kBits == 8 && count == kFour && is_word_aligned(to)) {
    *reinterpret_cast<std::uint32_t*>(to) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if (i < bytes) to[i] = static_cast<std::byte>(word >> (8 * i) & 0xFFU);
  }
}

template <int kBits>
__device__ void load_codes(const std::byte* from, std::int32_t (&q)[kFour], int count) {
  std::uint32_t word = 0;
  const int bytes = kBits == 8 ? count : (count + 1) / 2;
  if (kBits == 8 && count == kFour && is_word_aligned(from)) {
    word = *reinterpret_cast<const std::uint32_t*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (i < bytes) word |= static_cast<std::uint32_t>(from[i]) << (8 * i);
    }
  }
  constexpr std::uint32_t kSign = kBits == 8 ? 0x80U : 0x08U, kMask = 2 * kSign - 1;
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    q[j] = static_cast<std::int32_t>((word >> (kBits * j) & kMask) ^ kSign) - static_cast<std::int32_t>(kSign);
  }
}

template <int kBits, int kGroup>
__global__ void __launch_bounds__(kThreads) quantize_kernel(CodeArrays arrays, Layout layout) {
  constexpr int kLevels = kBits == 8 ? 127 : 7;
  const std::int64_t index = group_index<kGroup>();
  if (index >= layout.blocks) return;  // a whole group
  const int lane = static_cast<int>(threadIdx.x) % kGroup;
  const std::int64_t first = index * layout.block, count = layout.count_of(index);
  std::int32_t largest = 0;
  for (std::int64_t i = lane * kFour; i < count; i += kGroup * kFour) {
    float c[kFour];
    const int here = load_corrected(arrays, first + i, count - i, c);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const std::int32_t bits = j < here ? magnitude_bits(c[j]) : 0;
      largest = bits > largest ? bits : largest;
    }
  }
  const float scale = std::bit_cast<float>(group_max<kGroup>(largest)) / static_cast<float>(kLevels);
  const bool exists = magnitude_bits(product(scale, static_cast<float>(kLevels))) < kInfinityBits;
  if (lane == 0) {
    store_word(arrays.payload + layout.scale_at(index), std::bit_cast<std::uint32_t>(scale));
    if (!exists) *arrays.refused = 1;
  }
  if (!exists) return;
  const float divisor = scale == 0.0F ? 1.0F : scale;  // |c| is below half then, q becomes 0
  std::byte* const codes = arrays.payload + layout.codes_at(index);
  for (std::int64_t i = lane * kFour; i < count; i += kGroup * kFour) {
    float c[kFour];
    const int here = load_corrected(arrays, first + i, count - i, c);
    std::int32_t q[kFour];
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const std::int32_t rounded = std::bit_cast<std::int32_t>(c[j] / divisor + kRounder) - std::bit_cast<std::int32_t>(kRounder);
      q[j] = rounded < -kLevels ? -kLevels : rounded > kLevels ? kLevels : rounded;
      c[j] = c[j] - product(static_cast<float>(q[j]), scale);
    }
    store_codes<kBits>(codes + (kBits == 8 ? i : i / 2), q, here);
    if (arrays.new_residual != nullptr) store_floats(arrays.new_residual + first + i, c, here);
  }
}

template <int kBits, int kGroup>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const std::byte* payload, Layout layout, Decode decode, float* out) {
  const std::int64_t index = group_index<kGroup>();
  if (index >= layout.blocks) return;
  const std::int64_t first = index * layout.block, count = layout.count_of(index);
  const float scale = std::bit_cast<float>(load_word(payload + layout.scale_at(index)));
  const std::byte* const codes = payload + layout.codes_at(index);
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) % kGroup * kFour; i < count; i += kGroup * kFour) {
    const int here = count - i < kFour ? static_cast<int>(count - i) : kFour;
    std::int32_t q[kFour];
    load_codes<kBits>(codes + (kBits == 8 ? i : i / 2), q, here);
    float values[kFour] = {};
    if (decode == Decode::accumulate) load_floats(out + first + i, values, here);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const float value = product(static_cast<float>(q[j]), scale);
      values[j] = decode == Decode::accumulate ? values[j] + value : value;
    }
    store_floats(out + first + i, values, here);
  }
}

/// Sixteen threads take one block; all threads of a warp stay to the end.
__global__ void __launch_bounds__(kThreads) pack_signs_kernel(CodeArrays arrays, Layout layout) {
  const std::int64_t index = group_index<kSignLanes>();
  const int lane = static_cast<int>(threadIdx.x) % kSignLanes;
  const std::int64_t first = index * layout.block, count = index < layout.blocks ? layout.count_of(index) : 0;
  double own = 0;
  std::int32_t largest = 0;
  for (std::int64_t i = lane; i < count; i += kSignLanes) {
    const std::int32_t bits = magnitude_bits(corrected(arrays, first + i));
    largest = bits > largest ? bits : largest;
    own += static_cast<double>(std::bit_cast<float>(bits));
  }
  double sum = 0;
  const int group_lane = static_cast<int>(threadIdx.x) % kWarpSize / kSignLanes * kSignLanes;
  for (int l = 0; l < kSignLanes; ++l) {
    sum += __shfl_sync(kFullMask, own, group_lane + l);
    const std::int32_t other = __shfl_sync(kFullMask, largest, group_lane + l);
    largest = other > largest ? other : largest;
  }
  if (count == 0) return;
  const auto scale = static_cast<float>(sum / static_cast<double>(count));
  if (lane == 0) {
    store_word(arrays.payload + layout.scale_at(index), std::bit_cast<std::uint32_t>(scale));
    if (largest >= kInfinityBits) *arrays.refused = 1;
  }
  std::byte* const codes = arrays.payload + layout.codes_at(index);
  for (std::int64_t byte = lane; byte < (count + 7) / 8; byte += kSignLanes) {
    std::uint32_t signs = 0;
    for (int j = 0; j < 8 && 8 * byte + j < count; ++j) {
      const float c = corrected(arrays, first + 8 * byte + j);
      const std::uint32_t sign = std::bit_cast<std::uint32_t>(c) >> 31;
      signs |= sign << j;
      if (arrays.new_residual != nullptr) {
        arrays.new_residual[first + 8 * byte + j] = c - std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) | sign << 31);
      }
    }
    codes[byte] = static_cast<std::byte>(signs);
  }
}

template <int kGroup>
__global__ void __launch_bounds__(kThreads)
    unpack_signs_kernel(const std::byte* payload, Layout layout, Decode decode, float* out) {
  const std::int64_t index = group_index<kGroup>();
  if (index >= layout.blocks) return;
  const std::int64_t first = index * layout.block, count = layout.count_of(index);
  const std::uint32_t scale = load_word(payload + layout.scale_at(index));
  const std::byte* const codes = payload + layout.codes_at(index);
#pragma unroll 2
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) % kGroup; i < count; i += kGroup) {
    const std::uint32_t sign = static_cast<std::uint32_t>(codes[i / 8]) >> (i % 8) & 1U;
    const auto value = std::bit_cast<float>(scale | sign << 31);
    out[first + i] = decode == Decode::accumulate ? out[first + i] + value : value;
  }
}

Layout layout_of(std::int64_t elements, std::int64_t block, std::int64_t code_bytes) {
  return {elements, block, (elements + block - 1) / block, code_bytes};
}

std::int64_t quantized_bytes(int bits, std::int64_t block) { return bits == 8 ? block : (block + 1) / 2; }

dim3 grid_of(std::int64_t groups, int group) {
  const std::int64_t per_block = kThreads / group;
  return dim3(static_cast<unsigned>((groups + per_block - 1) / per_block));
}

}  // namespace

void launch_quantize(int bits, std::int64_t block, const CodeArrays& arrays, StreamHandle stream) {
  const Layout layout = layout_of(arrays.elements, block, quantized_bytes(bits, block));
  const auto start = [&](auto kernel, int group) {
    launch(kernel, grid_of(layout.blocks, group), dim3(kThreads), 0, stream, arrays, layout);
  };
  if (block <= kWarpBlock) return bits == 8 ? start(quantize_kernel<8, 32>, 32) : start(quantize_kernel<4, 32>, 32);
  bits == 8 ? start(quantize_kernel<8, kThreads>, kThreads) : start(quantize_kernel<4, kThreads>, kThreads);
}

void launch_dequantize(int bits, std::int64_t block, const std::byte* payload, Decode decode, float* out, std::int64_t elements,
                       StreamHandle stream) {
  const Layout layout = layout_of(elements, block, quantized_bytes(bits, block));
  const auto start = [&](auto kernel, int group) {
    launch(kernel, grid_of(layout.blocks, group), dim3(kThreads), 0, stream, payload, layout, decode, out);
  };
  if (block <= kWarpBlock) return bits == 8 ? start(dequantize_kernel<8, 32>, 32) : start(dequantize_kernel<4, 32>, 32);
  bits == 8 ? start(dequantize_kernel<8, kThreads>, kThreads) : start(dequantize_kernel<4, kThreads>, kThreads);
}

void launch_pack_signs(std::int64_t block, const CodeArrays& arrays, StreamHandle stream) {
  const Layout layout = layout_of(arrays.elements, block, (block + 7) / 8);
  launch(pack_signs_kernel, grid_of(layout.blocks, kSignLanes), dim3(kThreads), 0, stream, arrays, layout);
}

void launch_unpack_signs(std::int64_t block, const std::byte* payload, Decode decode, float* out, std::int64_t elements,
                         StreamHandle stream) {
  const Layout layout = layout_of(elements, block, (block + 7) / 8);
  const auto start = [&](auto kernel, int group) {
    launch(kernel, grid_of(layout.blocks, group), dim3(kThreads), 0, stream, payload, layout, decode, out);
  };
  block <= kWarpBlock ? start(unpack_signs_kernel<32>, 32) : start(unpack_signs_kernel<kThreads>, kThreads);
}

}  // namespace tandem::TANDEM_GPU
