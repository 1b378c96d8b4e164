// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/block_quantize.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/corrected_stream.h"

namespace tandem {
namespace {

using detail::corrected;
using detail::CorrectedStream;
using detail::kInfinityBits;

// Adding it to |x| < 2^22 leaves x, rounded half to even, in the low bits.
constexpr float kRounder = 0x1.8p23F;

// Elements of which the codes are kept unpacked, in the first-level cache. Even, so that no INT4 byte is split.
constexpr std::int64_t kTile = 1024;

// From so many elements on, a new residual in memory of its own would only push other data out of the caches.
constexpr std::size_t kPastCaches = std::size_t{1} << 21;

// Bits of max |c|; those of an infinity or NaN are above all others.
template <bool kAdd, bool kKeep>
[[gnu::always_inline]] inline std::int32_t largest_bits(const CorrectedStream<kAdd, kKeep>& stream, std::int64_t count) {
  const float* const gradient = stream.gradient;
  const float* const residual = stream.residual;
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, detail::magnitude_bits(corrected<kAdd>(gradient, residual, i)));
  }
  return largest;
}

template <bool kAdd, bool kKeep>
[[gnu::always_inline]] inline void quantize(const CorrectedStream<kAdd, kKeep>& stream, std::int64_t count, float scale,
                                            int levels, std::int8_t* codes) {
  const float* const gradient = stream.gradient;
  const float* const residual = stream.residual;
  float* const new_residual = stream.new_residual;
  const float divisor = scale == 0.0F ? 1.0F : scale;  // |c| is below half then, q becomes 0
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const float c = corrected<kAdd>(gradient, residual, i);
    const auto rounded = std::bit_cast<std::int32_t>(c / divisor + kRounder) - std::bit_cast<std::int32_t>(kRounder);
    const std::int32_t q = std::min(std::max(rounded, -levels), levels);
    codes[i] = static_cast<std::int8_t>(q);
    if constexpr (kKeep) new_residual[i] = c - static_cast<float>(q) * scale;
  }
}

[[gnu::always_inline]] inline void pack_nibbles(const std::int8_t* codes, std::int64_t count, std::uint8_t* packed) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count / 2; ++i) {
    std::uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    packed[i] = static_cast<std::uint8_t>((pair & 0x0F) | (pair >> 4 & 0xF0));
  }
  if (count % 2 != 0) packed[count / 2] = static_cast<std::uint8_t>(codes[count - 1] & 0x0F);
}

// One byte more than `count` may be written where that is odd.
[[gnu::always_inline]] inline void unpack_nibbles(const std::uint8_t* packed, std::int64_t count, std::int8_t* codes) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < (count + 1) / 2; ++i) {
    const auto pair = static_cast<std::uint16_t>((packed[i] & 0x0F) | (packed[i] & 0xF0) << 4);
    std::memcpy(codes + 2 * i, &pair, 2);
  }
  for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>((codes[i] ^ 8) - 8);
}

std::int64_t code_bytes(std::int64_t elements, int bits) { return bits == 8 ? elements : (elements + 1) / 2; }

// Writes around the caches, where the machine can: the line that is overwritten is not read first.
[[gnu::always_inline]] inline void store_past_caches(const float* from, std::int64_t count, float* to) {
#if defined(__SSE2__)
  std::int64_t i = 0;
  for (; i < count && reinterpret_cast<std::uintptr_t>(to + i) % 16 != 0; ++i) to[i] = from[i];
  for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  for (; i < count; ++i) to[i] = from[i];
#else
  std::copy_n(from, count, to);
#endif
}

// Stores past the caches are seen by other threads in order with what follows.
void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <int kBits, bool kAdd, bool kKeep>
[[gnu::always_inline]] inline bool compress_block(CorrectedStream<kAdd, kKeep> stream, std::int64_t count, bool past_caches,
                                                  std::byte* scale_at, std::byte* packed) {
  constexpr int kLevels = kBits == 8 ? 127 : 7;
  const float scale = std::bit_cast<float>(largest_bits(stream, count)) / static_cast<float>(kLevels);
  const float most = scale * static_cast<float>(kLevels);
  if (std::bit_cast<std::uint32_t>(most) >= kInfinityBits) return false;
  std::memcpy(scale_at, &scale, sizeof scale);
  auto* const bytes = reinterpret_cast<std::int8_t*>(packed);
  if (kBits == 8 && !past_caches) {
    quantize(stream, count, scale, kLevels, bytes);
    return true;
  }
  alignas(64) std::int8_t codes[kTile];
  alignas(64) float rest[kTile];
  for (std::int64_t first = 0; first < count; first += kTile) {
    const std::int64_t length = std::min(kTile, count - first);
    CorrectedStream<kAdd, kKeep> tile = stream;
    if (past_caches) tile.new_residual = rest;
    quantize(tile, length, scale, kLevels, kBits == 8 ? bytes + first : codes);
    if (past_caches) store_past_caches(rest, length, stream.new_residual);
    if constexpr (kBits == 4) pack_nibbles(codes, length, reinterpret_cast<std::uint8_t*>(packed) + first / 2);
    stream.advance(length);
  }
  return true;
}

template <bool kAdd, bool kKeep, int kBits>
bool compress_all(const CompressCall& call, std::int64_t block, InstructionSet set) {
  bool finite = true;
  const bool past_caches = kKeep && call.new_residual.data() != call.residual.data() && call.gradient.size() >= kPastCaches;
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const auto elements = static_cast<std::int64_t>(call.gradient.size());
        std::byte* scale_at = call.payload.data();
        std::byte* packed = scale_at + 4 * ((elements + block - 1) / block);
        CorrectedStream<kAdd, kKeep> stream(call);
        for (std::int64_t first = 0; first < elements; first += block) {
          const std::int64_t count = std::min(block, elements - first);
          if (!compress_block<kBits>(stream, count, past_caches, scale_at, packed)) {
            finite = false;
            return;
          }
          scale_at += sizeof(float);
          packed += kBits == 8 ? count : (count + 1) / 2;
          stream.advance(count);
        }
      });
  if (past_caches) finish_stores();
  return finite;
}

template <int kBits>
bool compress_as(const CompressCall& call, std::int64_t block, InstructionSet set) {
  return detail::with_operands(call, [&]<bool kAdd, bool kKeep>() { return compress_all<kAdd, kKeep, kBits>(call, block, set); });
}

template <bool kAccumulate>
[[gnu::always_inline]] inline void dequantize(const std::int8_t* codes, float scale, std::int64_t count, float* out) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(codes[i]) * scale;
    out[i] = kAccumulate ? out[i] + value : value;
  }
}

template <bool kAccumulate, int kBits>
void decompress_all(std::span<const std::byte> payload, std::int64_t block, std::span<float> out, InstructionSet set) {
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const auto elements = static_cast<std::int64_t>(out.size());
        const std::byte* scale_at = payload.data();
        const std::byte* packed = scale_at + 4 * ((elements + block - 1) / block);
        alignas(64) std::int8_t codes[kBits == 8 ? 1 : kTile];
        for (std::int64_t first = 0; first < elements; first += block) {
          const std::int64_t count = std::min(block, elements - first);
          float scale;
          std::memcpy(&scale, scale_at, sizeof scale);
          scale_at += sizeof scale;
          float* const to = out.data() + first;
          if constexpr (kBits == 8) {
            dequantize<kAccumulate>(reinterpret_cast<const std::int8_t*>(packed), scale, count, to);
          } else {
            for (std::int64_t i = 0; i < count; i += kTile) {
              const std::int64_t length = std::min(kTile, count - i);
              unpack_nibbles(reinterpret_cast<const std::uint8_t*>(packed) + i / 2, length, codes);
              dequantize<kAccumulate>(codes, scale, length, to + i);
            }
          }
          packed += kBits == 8 ? count : (count + 1) / 2;
        }
      });
}

}  // namespace

BlockQuantizeCodec::BlockQuantizeCodec(int bits, std::int64_t block, InstructionSet set) : bits_(bits), block_(block), set_(set) {
  TANDEM_CHECK((bits == 8 || bits == 4) && block >= 1, fmt::format("{} bits in blocks of {}", bits, block));
}

std::string BlockQuantizeCodec::name() const { return fmt::format("int{}/{}", bits_, block_); }

std::int64_t BlockQuantizeCodec::payload_bytes(std::int64_t elements) const {
  const std::int64_t blocks = (elements + block_ - 1) / block_;
  return 4 * blocks + elements / block_ * code_bytes(block_, bits_) + code_bytes(elements % block_, bits_);
}

bool BlockQuantizeCodec::compress(const CompressCall& call) const {
  detail::check_sizes(call, payload_bytes(static_cast<std::int64_t>(call.gradient.size())));
  return bits_ == 8 ? compress_as<8>(call, block_, set_) : compress_as<4>(call, block_, set_);
}

void BlockQuantizeCodec::decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition&) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(out.size())));
  return bits_ == 8 ? decompress_all<false, 8>(payload, block_, out, set_) : decompress_all<false, 4>(payload, block_, out, set_);
}

void BlockQuantizeCodec::decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                                               const CodecPosition&) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(sum.size())));
  return bits_ == 8 ? decompress_all<true, 8>(payload, block_, sum, set_) : decompress_all<true, 4>(payload, block_, sum, set_);
}

}  // namespace tandem
