// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/io/safetensors.h"
#include "core/rng.h"
#include "optimized/compression/codec.h"
#include "optimized/compression/instruction_set.h"
#include "reference/compression.h"

/// What the tests of this folder share. Nothing else includes it.
namespace tandem {

using Floats = std::vector<float>;
using ReferenceCodec = std::function<reference::Compressed<float>(std::span<const float>, std::span<const float>)>;

inline constexpr float kDenormal = std::numeric_limits<float>::denorm_min();

inline Floats normal_values(std::int64_t count, std::uint64_t seed, double deviation = 1.0) {
  CounterRng rng(seed, "compression test");
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = static_cast<float>(deviation * rng.next_normal());
  return values;
}

/// Kinds of gradients: of each, one of `count` elements.
inline std::vector<std::pair<std::string, Floats>> inputs(std::int64_t count, std::uint64_t seed) {
  Floats zero(static_cast<std::size_t>(count)), denormal = zero, wide = zero, equal = zero, sparse = zero;
  CounterRng rng(seed, "kinds");
  for (std::size_t i = 0; i < zero.size(); ++i) {
    const float sign = rng.next_below(2) == 0 ? 1.0F : -1.0F;
    zero[i] = sign * 0.0F;
    denormal[i] = sign * static_cast<float>(rng.next_below(300)) * kDenormal;
    wide[i] = static_cast<float>(std::ldexp(sign * rng.next_unit(), static_cast<int>(rng.next_below(240)) - 130));
    equal[i] = sign * 0.75F;
    sparse[i] = rng.next_below(50) == 0 ? sign * 3.0F : 0.0F;
  }
  return {{"normal", normal_values(count, seed)},
          {"zero", zero},
          {"denormal", denormal},
          {"wide", wide},
          {"equal", equal},
          {"sparse", sparse}};
}

inline std::vector<std::uint32_t> bits_of(std::span<const float> values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

struct Result {
  bool finite = false;
  std::vector<std::byte> payload;
  Floats residual, decompressed, accumulated;
};

inline float base_value(std::size_t i) { return static_cast<float>(i % 7) - 2.5F; }

/// Compresses with error feedback (an empty residual: the first step), then decompresses, and accumulates upon base_value().
inline Result run(const Codec& codec, const Floats& gradient, const Floats& residual, const CodecPosition& position = {}) {
  const auto count = static_cast<std::int64_t>(gradient.size());
  Result result;
  // The payload begins at an odd address, and what it does not set shows.
  std::vector<std::byte> memory(static_cast<std::size_t>(codec.payload_bytes(count)) + 1, std::byte{0xA5});
  const std::span<std::byte> payload = std::span(memory).subspan(1);
  result.residual.assign(gradient.size(), 777.0F);
  result.finite = codec.compress(
      {.gradient = gradient, .residual = residual, .new_residual = result.residual, .payload = payload, .position = position});
  result.payload.assign(payload.begin(), payload.end());
  if (!result.finite) return result;
  result.decompressed.assign(gradient.size(), 777.0F);
  codec.decompress(payload, result.decompressed, position);
  for (std::size_t i = 0; i < gradient.size(); ++i) result.accumulated.push_back(base_value(i));
  codec.decompress_accumulate(payload, result.accumulated, position);
  return result;
}

/// The element type T number `index` of a payload that begins with a run of T.
template <class T>
T payload_value(const std::vector<std::byte>& payload, std::size_t index, std::size_t first_byte = 0) {
  T value;
  std::memcpy(&value, payload.data() + first_byte + index * sizeof(T), sizeof(T));
  return value;
}

/// Compares residual and decoded elements with the reference, bit by bit, over three steps of error feedback and without it.
inline void expect_matches_reference(const Codec& codec, const ReferenceCodec& expected_of, const Floats& gradient,
                                     const std::string& what) {
  Floats residual;
  for (int step = 0; step < 3; ++step) {
    const reference::Compressed<float> expected = expected_of(gradient, residual);
    const Result got = run(codec, gradient, residual);
    ASSERT_EQ(got.finite, expected.finite) << what << " step " << step;
    if (!expected.finite) return;
    ASSERT_EQ(bits_of(got.residual), bits_of(expected.residual)) << what << " step " << step;
    ASSERT_EQ(bits_of(got.decompressed), bits_of(expected.decompressed)) << what << " step " << step;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      ASSERT_EQ(got.accumulated[i], base_value(i) + expected.decompressed[i]) << what << " step " << step << " element " << i;
    }
    if (step == 0) {
      std::vector<std::byte> alone(got.payload.size());
      ASSERT_TRUE(codec.compress({.gradient = gradient, .residual = {}, .new_residual = {}, .payload = alone})) << what;
      ASSERT_EQ(alone, got.payload) << what << " without feedback";
    }
    if (step > 0) {
      std::vector<std::byte> payload(got.payload.size());
      ASSERT_TRUE(codec.compress({.gradient = gradient, .residual = residual, .new_residual = residual, .payload = payload}));
      ASSERT_EQ(payload, got.payload) << what << " in place";
      ASSERT_EQ(bits_of(residual), bits_of(expected.residual)) << what << " in place";
    }
    residual = expected.residual;
  }
}

inline std::filesystem::path golden_pieces() {
  const std::filesystem::path source = TANDEM_SOURCE_DIR;
  const std::filesystem::path own = source / "results" / "golden" / "pieces";
  return std::filesystem::exists(own) ? own : source / ".." / "shared" / "golden" / "pieces";
}

}  // namespace tandem
