// SPDX-License-Identifier: Apache-2.0
#include "core/dtype.h"

#include <bit>
#include <cmath>
#include <limits>
#include <ostream>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/rng.h"

namespace tandem {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kAll[] = {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i64,
                          DType::i32, DType::i16, DType::i8,  DType::u16,  DType::u8};

using ToBits = std::uint16_t (*)(float) noexcept;
using FromBits = float (*)(std::uint16_t) noexcept;

// Nearest-even by definition: of the two neighbours among all finite values, the nearer, on a tie the one with even bits.
std::uint16_t nearest_even(float value, FromBits from_bits, std::uint16_t infinity_bits) {
  const bool negative = std::signbit(value);
  const double magnitude = std::abs(static_cast<double>(value));
  std::uint16_t low = 0;
  std::uint16_t high = infinity_bits;
  while (high - low > 1) {  // positive bit patterns are ordered like their values
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (static_cast<double>(from_bits(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = from_bits(low);
  const double spacing = below - from_bits(static_cast<std::uint16_t>(low - 1));
  const double above = high == infinity_bits ? below + spacing : from_bits(high);  // where the next number would be
  const double middle = below + (above - below) / 2;
  const bool up = magnitude > middle || (magnitude == middle && low % 2 == 1);
  return static_cast<std::uint16_t>((up ? high : low) | (negative ? 0x8000 : 0));
}

// Values around every rounding boundary and random bit patterns.
std::vector<float> probes(FromBits from_bits, std::uint16_t infinity_bits) {
  std::vector<float> values;
  for (std::uint16_t bits = 1; bits + 1 < infinity_bits; ++bits) {
    const float low = from_bits(bits);
    const float high = from_bits(static_cast<std::uint16_t>(bits + 1));
    const float tie = low + (high - low) / 2;
    for (const float value : {low, std::nextafter(tie, 0.0F), tie, std::nextafter(tie, kInfinity)}) values.push_back(value);
  }
  CounterRng rng(1, "dtype");
  while (values.size() < 300000) {
    const auto value = std::bit_cast<float>(rng.next_u32());
    if (std::isfinite(value)) values.push_back(value);
  }
  return values;
}

TEST(DType, NamesParseBack) {
  for (const DType dtype : kAll) EXPECT_EQ(parse_dtype(name(dtype)), dtype);
  EXPECT_THROW((void)parse_dtype("float32"), InputError);
}

TEST(DType, SizesAreThoseOfTheStoredTypes) {
  EXPECT_EQ(size_bytes(dtype_of<double>), sizeof(double));
  EXPECT_EQ(size_bytes(dtype_of<float>), sizeof(float));
  EXPECT_EQ(size_bytes(dtype_of<std::int64_t>), 8U);
  EXPECT_EQ(size_bytes(dtype_of<std::int32_t>), 4U);
  EXPECT_EQ(size_bytes(dtype_of<std::uint16_t>), 2U);
  EXPECT_EQ(size_bytes(dtype_of<std::int8_t>), 1U);
  EXPECT_EQ(size_bytes(dtype_of<std::uint8_t>), 1U);
  EXPECT_EQ(size_bytes(DType::i16), 2U);
  EXPECT_EQ(size_bytes(DType::f16), 2U);
  EXPECT_EQ(size_bytes(DType::bf16), 2U);
}

TEST(DType, UnitRoundoffIsHalfTheSpacingAboveOne) {
  EXPECT_EQ(unit_roundoff(DType::f64), std::numeric_limits<double>::epsilon() / 2);
  EXPECT_EQ(unit_roundoff(DType::f32), std::numeric_limits<float>::epsilon() / 2);
  EXPECT_EQ(unit_roundoff(DType::f16), (from_f16_bits(0x3C01) - 1.0) / 2);
  EXPECT_EQ(unit_roundoff(DType::bf16), (from_bf16_bits(0x3F81) - 1.0) / 2);
  EXPECT_THROW((void)unit_roundoff(DType::i32), ContractError);
}

TEST(DType, PrecisionNamesGiveOneDtypeThroughout) {
  EXPECT_EQ(numerics_from_precision("fp32"), Numerics{});
  EXPECT_EQ(numerics_from_precision("fp64"), (Numerics{DType::f64, DType::f64, DType::f64, DType::f64, DType::f64}));
  EXPECT_THROW((void)numerics_from_precision("fp8"), InputError);
}

struct Format {
  const char* name;
  ToBits to_bits;
  FromBits from_bits;
  std::uint16_t infinity;

  friend void PrintTo(const Format& format, std::ostream* out) { *out << format.name; }
};

class HalfFormat : public testing::TestWithParam<Format> {};

TEST_P(HalfFormat, EveryPatternRoundTrips) {
  const Format& format = GetParam();
  for (std::uint32_t pattern = 0; pattern <= 0xFFFF; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const float value = format.from_bits(bits);
    if ((bits & 0x7FFF) > format.infinity) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      const std::uint16_t back = format.to_bits(value);
      ASSERT_GT(back & 0x7FFF, format.infinity) << pattern;
      ASSERT_EQ(back & 0x8000, bits & 0x8000) << pattern;
    } else {
      ASSERT_EQ(format.to_bits(value), bits) << pattern;
    }
  }
}

TEST_P(HalfFormat, RoundsToNearestEven) {
  const Format& format = GetParam();
  for (const float value : probes(format.from_bits, format.infinity)) {
    ASSERT_EQ(format.to_bits(value), nearest_even(value, format.from_bits, format.infinity)) << value;
    ASSERT_EQ(format.to_bits(-value), nearest_even(-value, format.from_bits, format.infinity)) << -value;
  }
}

TEST_P(HalfFormat, OverflowsToInfinityAndKeepsSignedZero) {
  const Format& format = GetParam();
  const float largest = format.from_bits(static_cast<std::uint16_t>(format.infinity - 1));
  const float spacing = largest - format.from_bits(static_cast<std::uint16_t>(format.infinity - 2));

  EXPECT_EQ(format.to_bits(largest + spacing / 2), format.infinity);
  EXPECT_EQ(format.to_bits(std::nextafter(largest + spacing / 2, 0.0F)), format.infinity - 1);
  EXPECT_EQ(format.to_bits(kInfinity), format.infinity);
  EXPECT_EQ(format.to_bits(-kInfinity), format.infinity | 0x8000);
  EXPECT_EQ(format.to_bits(0.0F), 0);
  EXPECT_EQ(format.to_bits(-0.0F), 0x8000);
}

INSTANTIATE_TEST_SUITE_P(Formats, HalfFormat,
                         testing::Values(Format{"f16", to_f16_bits, from_f16_bits, 0x7C00},
                                         Format{"bf16", to_bf16_bits, from_bf16_bits, 0x7F80}),
                         [](const auto& test) { return test.param.name; });

TEST(F16, KnownValues) {
  const std::pair<float, int> known[] = {{1.0F, 0x3C00},       {-2.0F, 0xC000},        {65504.0F, 0x7BFF},
                                         {65519.0F, 0x7BFF},   {65520.0F, 0x7C00},     {0x1p-14F, 0x0400},
                                         {0x1p-24F, 0x0001},   {0x1p-25F, 0x0000},     {0x1.8p-24F, 0x0002},
                                         {0x1.000002p-25F, 1}, {1 + 0x1p-11F, 0x3C00}, {1 + 0x3p-11F, 0x3C02}};
  for (const auto& [value, bits] : known) EXPECT_EQ(to_f16_bits(value), bits) << value;
}

TEST(Bf16, KnownValues) {
  const std::pair<float, int> known[] = {
      {1.0F, 0x3F80}, {-2.0F, 0xC000}, {1 + 0x1p-8F, 0x3F80}, {1 + 0x3p-8F, 0x3F82}, {0x1p-133F, 1}};
  for (const auto& [value, bits] : known) EXPECT_EQ(to_bf16_bits(value), bits) << value;
}

#ifdef __FLT16_MANT_DIG__
TEST(F16, AgreesWithTheCompilersHalfType) {
  for (const float value : probes(from_f16_bits, 0x7C00)) {
    ASSERT_EQ(to_f16_bits(value), std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))) << value;
  }
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto expected = static_cast<float>(std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits)));
    if (std::isnan(expected)) continue;
    ASSERT_EQ(from_f16_bits(static_cast<std::uint16_t>(bits)), expected) << bits;
  }
}
#endif

}  // namespace
}  // namespace tandem
