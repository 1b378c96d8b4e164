// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/storage.h"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "kernels/cpu/half_test_support.h"

namespace tandem::cpu {
namespace {

struct NamedTables {
  const char* name;
  const VectorTables* tables;
};

std::vector<NamedTables> available_tables() {
  std::vector<NamedTables> tables = {{"baseline", &baseline_tables()}};
#if defined(__x86_64__)
  if (try_kernels(1, "avx2") != nullptr) tables.push_back({"avx2", &avx2_tables()});
  if (try_kernels(1, "avx512") != nullptr) tables.push_back({"avx512", &avx512_tables()});
#endif
  return tables;
}

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

class Storage : public testing::TestWithParam<DType> {
 protected:
  [[nodiscard]] static std::uint16_t to_bits(float value) {
    return GetParam() == DType::bf16 ? to_bf16_bits(value) : to_f16_bits(value);
  }
  [[nodiscard]] static float from_bits(std::uint16_t bits) {
    return GetParam() == DType::bf16 ? from_bf16_bits(bits) : from_f16_bits(bits);
  }
};

TEST_P(Storage, EveryPatternWidensToTheBitsOfTheDefinition) {
  std::vector<std::uint16_t> halves(1 << 16);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> widened(halves.size());
  for (const auto& [set, tables] : available_tables()) {
    widen(*tables, halves.data(), GetParam(), widened.data(), static_cast<std::int64_t>(halves.size()));
    for (std::size_t i = 0; i < halves.size(); ++i) {
      ASSERT_EQ(bits_of(widened[i]), bits_of(from_bits(halves[i]))) << set << ", pattern " << i;
    }
  }
}

/// The neighbours of every 16-bit number and the ties between them, in both signs; every exponent of fp32 with mantissas of all
/// kinds; NaN of several payloads.
std::vector<float> numbers_to_narrow(DType dtype) {
  std::vector<std::uint32_t> patterns;
  for (std::uint32_t half = 0; half < 0x7F80; ++half) {
    const auto bits = static_cast<std::uint16_t>(half);
    const std::uint32_t here = bits_of(dtype == DType::bf16 ? from_bf16_bits(bits) : from_f16_bits(bits));
    const std::uint32_t tie = dtype == DType::bf16 ? here + 0x8000U : here + 0x1000U;
    for (const std::uint32_t pattern : {here, here + 1, tie - 1, tie, tie + 1}) patterns.push_back(pattern);
  }
  for (std::uint32_t pattern = 0; pattern < 0x7F800000U; pattern += 10'007) patterns.push_back(pattern);
  // 2^-25 is the tie between 0 and the least fp16 number; 65520 the one between its largest and infinity.
  for (const std::uint32_t pattern :
       {0U, 1U, 0x7FFFFFU, 0x800000U, 0x33000000U, 0x33000001U, 0x477FEFFFU, 0x477FF000U, 0x477FE000U, 0x7F7FFFFFU, 0x7F800000U,
        0x7F800001U, 0x7FA00000U, 0x7FC00001U, 0x7FFFFFFFU}) {
    patterns.push_back(pattern);
  }
  std::vector<float> numbers;
  for (const std::uint32_t pattern : patterns) {
    numbers.push_back(std::bit_cast<float>(pattern));
    numbers.push_back(std::bit_cast<float>(pattern | 0x80000000U));
  }
  return numbers;
}

TEST_P(Storage, NarrowsToTheBitsOfTheDefinition) {
  const std::vector<float> numbers = numbers_to_narrow(GetParam());
  std::vector<std::uint16_t> narrowed(numbers.size());
  for (const auto& [set, tables] : available_tables()) {
    narrow(*tables, numbers.data(), GetParam(), narrowed.data(), static_cast<std::int64_t>(numbers.size()));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      ASSERT_EQ(narrowed[i], to_bits(numbers[i])) << set << ", " << numbers[i] << " = " << bits_of(numbers[i]);
    }
  }
}

TEST_P(Storage, EndsOfAnyLengthAreConvertedAndNothingBeyond) {
  const std::vector<float> numbers = floats(100, 1);
  for (const auto& [set, tables] : available_tables()) {
    for (std::int64_t count = 0; count < 70; ++count) {
      std::vector<std::uint16_t> narrowed(100, 0x1234);
      std::vector<float> widened(100, 7.5F);
      narrow(*tables, numbers.data() + 1, GetParam(), narrowed.data() + 1, count);
      widen(*tables, narrowed.data() + 1, GetParam(), widened.data() + 3, count);
      for (std::int64_t i = 0; i < 96; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const bool inside = i < count;
        ASSERT_EQ(narrowed[at + 1], inside ? to_bits(numbers[at + 1]) : 0x1234) << set << ", " << count;
        ASSERT_EQ(widened[at + 3], inside ? from_bits(to_bits(numbers[at + 1])) : 7.5F) << set << ", " << count;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Storage, testing::Values(DType::bf16, DType::f16),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(Storage, Fp32IsCopiedAndOtherDtypesAreRefused) {
  const std::vector<float> from = {1.5F, 0x1p-130F};
  std::vector<float> to(2), back(2);
  widen(baseline_tables(), from.data(), DType::f32, to.data(), 2);
  narrow(baseline_tables(), to.data(), DType::f32, back.data(), 2);
  EXPECT_EQ(back, from);
  EXPECT_THROW(widen(baseline_tables(), from.data(), DType::f64, to.data(), 1), ContractError);
  EXPECT_THROW(narrow(baseline_tables(), from.data(), DType::u16, to.data(), 1), ContractError);
}

TEST(Pieces, KeepFp32InPlaceAndStoreHalvesOnlyWhenAsked) {
  ThreadScratch scratch(1);
  scratch.reserve(Pieces::bytes(2, 5));
  std::vector<float> single = {1, 2, 3, 4, 5, 6};
  std::vector<std::uint16_t> half(6, to_bf16_bits(9.0F));
  const TensorView wide_view(single.data(), DType::f32, {6}), half_view(half.data(), DType::bf16, {6});
  Pieces pieces(baseline_tables(), scratch, 0);
  EXPECT_EQ(pieces.read<float>(wide_view, 1, 5), single.data() + 1);
  EXPECT_EQ(pieces.read<float>(TensorView(), 0, 5), nullptr);
  float* updated = pieces.update<float>(half_view, 1, 3);
  EXPECT_EQ(updated[2], 9.0F);
  updated[0] = 2.0F;
  EXPECT_EQ(half[1], to_bf16_bits(9.0F));
  pieces.store();
  EXPECT_EQ(half[0], to_bf16_bits(9.0F));
  EXPECT_EQ(half[1], to_bf16_bits(2.0F));
  EXPECT_NO_THROW((void)pieces.take(5));
  EXPECT_THROW((void)pieces.take(1), ContractError);
}

TEST(Pieces, NestedOnesLeaveThoseOutsideAlone) {
  ThreadScratch scratch(1);
  scratch.reserve(Pieces::bytes(2, 4));
  std::vector<std::uint16_t> a(4, to_f16_bits(1.0F)), b(4, to_f16_bits(2.0F));
  Pieces outer(baseline_tables(), scratch, 0);
  const float* kept = outer.read<float>(TensorView(a.data(), DType::f16, {4}), 0, 4);
  for (int i = 0; i < 3; ++i) {
    Pieces inner = outer.nested();
    EXPECT_EQ(inner.read<float>(TensorView(b.data(), DType::f16, {4}), 0, 4)[3], 2.0F);
  }
  EXPECT_EQ(kept[3], 1.0F);
}

}  // namespace
}  // namespace tandem::cpu
