// SPDX-License-Identifier: Apache-2.0
#include "core/dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
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

TEST(DType, OnlyHalvesAre16BitAndWidenToFp32) {
  for (const DType dtype : kAll) {
    const bool half = dtype == DType::f16 || dtype == DType::bf16;
    EXPECT_EQ(is_16bit(dtype), half) << name(dtype);
    EXPECT_EQ(wide(dtype), half ? DType::f32 : dtype) << name(dtype);
  }
}

TEST(DType, RoundToGoesThroughTheBitsOfTheDtype) {
  for (const float value : {1.0F / 3.0F, -65519.0F, 65520.0F, 0x1p-25F, 0x1.8p-134F, kInfinity, -0.0F}) {
    EXPECT_EQ(round_to(value, DType::f32), value);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(round_to(value, DType::bf16)),
              std::bit_cast<std::uint32_t>(from_bf16_bits(to_bf16_bits(value))));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(round_to(value, DType::f16)),
              std::bit_cast<std::uint32_t>(from_f16_bits(to_f16_bits(value))));
  }
  EXPECT_NE(round_to(1.0F / 3.0F, DType::bf16), round_to(1.0F / 3.0F, DType::f16));
  EXPECT_TRUE(std::isnan(round_to(std::numeric_limits<float>::quiet_NaN(), DType::f16)));
}

TEST(Precision, NamesGiveTheirNumerics) {
  using enum DType;
  EXPECT_EQ(numerics_from_precision("fp32"), Numerics{});
  EXPECT_EQ(numerics_from_precision("fp64"), (Numerics{f64, f64, f64, f64, f64}));
  EXPECT_EQ(numerics_from_precision("bf16"), (Numerics{bf16, bf16, f32, f32, f32}));
  EXPECT_EQ(numerics_from_precision("fp16"), (Numerics{f16, f16, f32, f32, f32}));
  EXPECT_EQ(numerics_from_precision("bf16-autocast"), (Numerics{f32, bf16, f32, f32, f32}));
  EXPECT_EQ(numerics_from_precision("fp16-autocast"), (Numerics{f32, f16, f32, f32, f32}));
  EXPECT_EQ(numerics_from_precision("fp8"), (Numerics{bf16, bf16, f32, f32, f32, true}));
}

TEST(Precision, EveryOneListedIsKnownOnceAndUnknownOnesListThem) {
  const std::set<std::string_view> names(precisions().begin(), precisions().end());
  EXPECT_EQ(names.size(), precisions().size());
  EXPECT_EQ(names.size(), 7U);
  for (const std::string_view name : names) EXPECT_NO_THROW((void)numerics_from_precision(name)) << name;
  try {
    (void)numerics_from_precision("int4");
    FAIL() << "no error";
  } catch (const InputError& error) {
    const std::string text = error.what();
    for (const std::string_view name : names) EXPECT_NE(text.find(name), std::string::npos) << text;
  }
}

TEST(Precision, OnlyStorageBelowTheMasterNeedsAMasterCopyAndOnlyNarrowerProductsAreAutocast) {
  const std::set<std::string_view> with_master = {"bf16", "fp16", "fp8"}, autocast = {"bf16-autocast", "fp16-autocast"};
  for (const std::string_view name : precisions()) {
    const Numerics numerics = numerics_from_precision(name);
    EXPECT_EQ(numerics.has_master_copy(), with_master.contains(name)) << name;
    EXPECT_EQ(numerics.autocast(), autocast.contains(name)) << name;
    EXPECT_EQ(numerics.fp8, name == "fp8") << name;
  }
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

/// Every finite number >= 0 of a format with one sign bit, from its definition: bits are exponent (biased) and mantissa.
struct Fp8Definition {
  Fp8Format format;
  int mantissa_bits, bias;
  int patterns;  // finite and not negative: e4m3 gives up one pattern for NaN, e5m2 an exponent for infinity and NaN

  [[nodiscard]] float value(int bits) const {
    const int exponent = bits >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
    const int leading = exponent == 0 ? 0 : 1 << mantissa_bits;
    return std::ldexp(static_cast<float>(leading + mantissa), std::max(exponent, 1) - bias - mantissa_bits);
  }

  friend void PrintTo(const Fp8Definition& definition, std::ostream* out) { *out << definition.mantissa_bits << " bits"; }
};

class Fp8 : public testing::TestWithParam<Fp8Definition> {};

TEST_P(Fp8, EveryNumberIsAFixedPointAndTheLargestIsTheLast) {
  const Fp8Definition& fp8 = GetParam();
  for (int bits = 0; bits < fp8.patterns; ++bits) {
    const float value = fp8.value(bits);
    ASSERT_EQ(round_to_fp8(value, fp8.format), value) << bits;
    ASSERT_EQ(round_to_fp8(-value, fp8.format), -value) << bits;
    ASSERT_EQ(std::signbit(round_to_fp8(-value, fp8.format)), true) << bits;
  }
  EXPECT_EQ(largest(fp8.format), fp8.value(fp8.patterns - 1));
}

TEST_P(Fp8, BetweenNumbersRoundsToTheNearestAndTiesToEven) {
  const Fp8Definition& fp8 = GetParam();
  for (int bits = 0; bits + 1 < fp8.patterns; ++bits) {
    const float low = fp8.value(bits), high = fp8.value(bits + 1), tie = low + (high - low) / 2;
    const float even = bits % 2 == 0 ? low : high;
    for (const float sign : {1.0F, -1.0F}) {
      ASSERT_EQ(round_to_fp8(sign * tie, fp8.format), sign * even) << bits;
      ASSERT_EQ(round_to_fp8(sign * std::nextafter(tie, 0.0F), fp8.format), sign * low) << bits;
      ASSERT_EQ(round_to_fp8(sign * std::nextafter(tie, kInfinity), fp8.format), sign * high) << bits;
    }
  }
}

TEST_P(Fp8, SaturatesBeyondTheLargestAndKeepsNan) {
  const Fp8Definition& fp8 = GetParam();
  const float most = largest(fp8.format);
  for (const float value :
       {std::nextafter(most, kInfinity), most * 1.0625F, most * 2, std::numeric_limits<float>::max(), kInfinity}) {
    EXPECT_EQ(round_to_fp8(value, fp8.format), most) << value;
    EXPECT_EQ(round_to_fp8(-value, fp8.format), -most) << value;
  }
  EXPECT_TRUE(std::isnan(round_to_fp8(std::numeric_limits<float>::quiet_NaN(), fp8.format)));
}

TEST_P(Fp8, BelowTheLeastNumberRoundsToItOrToZero) {
  const Fp8Definition& fp8 = GetParam();
  const float least = fp8.value(1);
  EXPECT_EQ(round_to_fp8(least * 0.5F, fp8.format), 0.0F);
  EXPECT_EQ(round_to_fp8(least * 0.50001F, fp8.format), least);
  EXPECT_EQ(round_to_fp8(std::numeric_limits<float>::denorm_min(), fp8.format), 0.0F);
  EXPECT_TRUE(std::signbit(round_to_fp8(-least * 0.25F, fp8.format)));
}

TEST_P(Fp8, IsMonotone) {
  const Fp8Definition& fp8 = GetParam();
  float before = -kInfinity;
  for (std::uint32_t bits = 0x46FFFFFF; bits > 0x36000000; bits -= 0x1357) {
    const float rounded = round_to_fp8(-std::bit_cast<float>(bits), fp8.format);
    ASSERT_GE(rounded, before) << -std::bit_cast<float>(bits);
    before = rounded;
  }
  EXPECT_EQ(before, 0.0F);
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8,
                         testing::Values(Fp8Definition{Fp8Format::e4m3, 3, 7, 127}, Fp8Definition{Fp8Format::e5m2, 2, 15, 124}),
                         [](const auto& test) { return test.param.format == Fp8Format::e4m3 ? "e4m3" : "e5m2"; });

TEST(Fp8Format, KnownValues) {
  EXPECT_EQ(largest(Fp8Format::e4m3), 448.0F);
  EXPECT_EQ(largest(Fp8Format::e5m2), 57344.0F);
  EXPECT_EQ(round_to_fp8(0.3F, Fp8Format::e4m3), 0.3125F);
  EXPECT_EQ(round_to_fp8(0.3F, Fp8Format::e5m2), 0.3125F);
  EXPECT_EQ(round_to_fp8(17.0F, Fp8Format::e4m3), 16.0F);
  EXPECT_EQ(round_to_fp8(0x1.8p-10F, Fp8Format::e4m3), 0x1p-9F);
  EXPECT_EQ(round_to_fp8(0x1p-16F, Fp8Format::e5m2), 0x1p-16F);
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
