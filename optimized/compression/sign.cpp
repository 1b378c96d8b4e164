// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/sign.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/corrected_stream.h"

namespace tandem {
namespace {

using detail::corrected;
using detail::CorrectedStream;
using detail::kInfinityBits;
using detail::kMagnitudeMask;

constexpr std::int64_t kLanes = 16;
// Elements of which the signs are kept a byte each, in the first-level cache. A multiple of 8.
constexpr std::int64_t kTile = 1024;

// Eight bytes of 0 or 1 times this: the top byte has bit i from byte i, and no sum carries.
constexpr std::uint64_t kGatherBits = 0x0102040810204080U;
constexpr std::uint64_t kEachByte = 0x0101010101010101U;
constexpr std::uint64_t kBitOfByte = 0x8040201008040201U;  // byte i has bit i

using Floats [[gnu::vector_size(kLanes * sizeof(float)), gnu::aligned(4), gnu::may_alias]] = float;
using Words [[gnu::vector_size(kLanes * sizeof(float))]] = std::int32_t;
using Sums [[gnu::vector_size(kLanes * sizeof(double))]] = double;

struct Magnitudes {
  double sum = 0.0;
  bool finite = true;
};

template <bool kAdd, bool kKeep>
[[gnu::always_inline]] inline Magnitudes magnitudes(const CorrectedStream<kAdd, kKeep>& stream, std::int64_t count) {
  const float* const gradient = stream.gradient;
  const float* const residual = stream.residual;
  Sums sums = {};
  Words largest = {};
  std::int64_t first = 0;
  for (; first + kLanes <= count; first += kLanes) {
    Floats c = *reinterpret_cast<const Floats*>(gradient + first);
    if constexpr (kAdd) c += *reinterpret_cast<const Floats*>(residual + first);
    const Words bits = reinterpret_cast<Words>(c) & static_cast<std::int32_t>(kMagnitudeMask);
    largest = bits > largest ? bits : largest;
    sums += __builtin_convertvector(reinterpret_cast<Floats>(bits), Sums);
  }
  std::int32_t most = 0;
  for (std::int64_t lane = 0; first + lane < count; ++lane) {
    const std::int32_t bits = detail::magnitude_bits(corrected<kAdd>(gradient, residual, first + lane));
    most = std::max(most, bits);
    sums[lane] += static_cast<double>(std::bit_cast<float>(bits));
  }
  Magnitudes result;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    result.sum += sums[lane];
    most = std::max(most, largest[lane]);
  }
  result.finite = static_cast<std::uint32_t>(most) < kInfinityBits;
  return result;
}

template <bool kAdd, bool kKeep>
[[gnu::always_inline]] inline void split_signs(const CorrectedStream<kAdd, kKeep>& stream, std::int64_t count, float scale,
                                               std::uint8_t* signs) {
  const float* const gradient = stream.gradient;
  const float* const residual = stream.residual;
  float* const new_residual = stream.new_residual;
  const auto scale_bits = std::bit_cast<std::uint32_t>(scale);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const float c = corrected<kAdd>(gradient, residual, i);
    const std::uint32_t sign = std::bit_cast<std::uint32_t>(c) & ~kMagnitudeMask;
    signs[i] = static_cast<std::uint8_t>(sign >> 31);
    if constexpr (kKeep) new_residual[i] = c - std::bit_cast<float>(scale_bits | sign);
  }
}

// `signs` has room for a multiple of 8.
[[gnu::always_inline]] inline void pack_bits(std::uint8_t* signs, std::int64_t count, std::uint8_t* packed) {
  for (std::int64_t i = count; i % 8 != 0; ++i) signs[i] = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < (count + 7) / 8; ++i) {
    std::uint64_t eight;
    std::memcpy(&eight, signs + 8 * i, 8);
    packed[i] = static_cast<std::uint8_t>(eight * kGatherBits >> 56);
  }
}

[[gnu::always_inline]] inline void unpack_bits(const std::uint8_t* packed, std::int64_t count, std::uint8_t* signs) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < (count + 7) / 8; ++i) {
    const std::uint64_t own_bit = packed[i] * kEachByte & kBitOfByte;
    const std::uint64_t eight = (own_bit + 0x7F * kEachByte) >> 7 & kEachByte;
    std::memcpy(signs + 8 * i, &eight, 8);
  }
}

template <bool kAdd, bool kKeep>
bool compress_all(const CompressCall& call, std::int64_t block, InstructionSet set) {
  bool finite = true;
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const auto elements = static_cast<std::int64_t>(call.gradient.size());
        std::byte* scale_at = call.payload.data();
        auto* packed = reinterpret_cast<std::uint8_t*>(scale_at + 4 * ((elements + block - 1) / block));
        CorrectedStream<kAdd, kKeep> stream(call);
        alignas(64) std::uint8_t signs[kTile];
        for (std::int64_t first = 0; first < elements; first += block) {
          const std::int64_t count = std::min(block, elements - first);
          const Magnitudes found = magnitudes(stream, count);
          if (!found.finite) {
            finite = false;
            return;
          }
          const auto scale = static_cast<float>(found.sum / static_cast<double>(count));
          std::memcpy(scale_at, &scale, sizeof scale);
          scale_at += sizeof scale;
          for (std::int64_t i = 0; i < count; i += kTile) {
            const std::int64_t length = std::min(kTile, count - i);
            split_signs(stream, length, scale, signs);
            pack_bits(signs, length, packed);
            packed += (length + 7) / 8;
            stream.advance(length);
          }
        }
      });
  return finite;
}

template <bool kAccumulate>
void decompress_all(std::span<const std::byte> payload, std::int64_t block, std::span<float> out, InstructionSet set) {
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const auto elements = static_cast<std::int64_t>(out.size());
        const std::byte* scale_at = payload.data();
        const auto* packed = reinterpret_cast<const std::uint8_t*>(scale_at + 4 * ((elements + block - 1) / block));
        alignas(64) std::uint8_t signs[kTile];
        for (std::int64_t first = 0; first < elements; first += block) {
          std::uint32_t scale_bits;
          std::memcpy(&scale_bits, scale_at, sizeof scale_bits);
          scale_at += sizeof scale_bits;
          const std::int64_t end = std::min(first + block, elements);
          for (std::int64_t begin = first; begin < end; begin += kTile) {
            const std::int64_t length = std::min(kTile, end - begin);
            unpack_bits(packed, length, signs);
            packed += (length + 7) / 8;
            float* const to = out.data() + begin;
#pragma GCC ivdep
            for (std::int64_t i = 0; i < length; ++i) {
              const auto value = std::bit_cast<float>(scale_bits | static_cast<std::uint32_t>(signs[i]) << 31);
              to[i] = kAccumulate ? to[i] + value : value;
            }
          }
        }
      });
}

}  // namespace

SignCodec::SignCodec(std::int64_t block, InstructionSet set) : block_(block), set_(set) {
  TANDEM_CHECK(block >= 1, fmt::format("blocks of {}", block));
}

std::string SignCodec::name() const { return fmt::format("sign/{}", block_); }

std::int64_t SignCodec::payload_bytes(std::int64_t elements) const {
  const std::int64_t blocks = (elements + block_ - 1) / block_;
  return 4 * blocks + elements / block_ * ((block_ + 7) / 8) + (elements % block_ + 7) / 8;
}

bool SignCodec::compress(const CompressCall& call) const {
  detail::check_sizes(call, payload_bytes(static_cast<std::int64_t>(call.gradient.size())));
  return detail::with_operands(call, [&]<bool kAdd, bool kKeep>() { return compress_all<kAdd, kKeep>(call, block_, set_); });
}

void SignCodec::decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition&) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(out.size())));
  decompress_all<false>(payload, block_, out, set_);
}

void SignCodec::decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum, const CodecPosition&) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(sum.size())));
  decompress_all<true>(payload, block_, sum, set_);
}

}  // namespace tandem
