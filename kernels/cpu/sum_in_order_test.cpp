// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/sum_in_order.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

template <class T>
std::byte* bytes_of(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

using ToBits = std::uint16_t (*)(float) noexcept;
using FromBits = float (*)(std::uint16_t) noexcept;

void expect_fp32_accumulation(DType dtype, ToBits to_bits, FromBits from_bits) {
  const std::size_t count = 20011;
  std::vector<std::vector<std::uint16_t>> inputs(5, std::vector<std::uint16_t>(count));
  std::vector<std::uint16_t> expected(count), stepwise(count), output(count);
  for (std::size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      const float value =
          std::ldexp(1.0F + 0.01F * static_cast<float>((i * 31 + rank * 17) % 97), static_cast<int>(rank * 3 + i) % 11);
      inputs[rank][i] = to_bits(rank % 2 == 1 ? -value : value);
      sum = rank == 0 ? from_bits(inputs[0][i]) : sum + from_bits(inputs[rank][i]);
      stepwise[i] = rank == 0 ? inputs[0][i] : to_bits(from_bits(stepwise[i]) + from_bits(inputs[rank][i]));
    }
    expected[i] = to_bits(sum);
  }
  ASSERT_NE(expected, stepwise) << "these values cannot tell one rounding from many";
  std::vector<const std::byte*> sources;
  for (auto& input : inputs) sources.push_back(bytes_of(input));
  const std::array<std::byte*, 1> destinations = {bytes_of(output)};

  sum_in_order(dtype, sources, destinations, static_cast<std::int64_t>(count));

  EXPECT_EQ(output, expected);
}

TEST(SumInOrder, AddsBf16InFp32AndRoundsOnce) { expect_fp32_accumulation(DType::bf16, to_bf16_bits, from_bf16_bits); }
TEST(SumInOrder, AddsF16InFp32AndRoundsOnce) { expect_fp32_accumulation(DType::f16, to_f16_bits, from_f16_bits); }

TEST(SumInOrder, KeepsNanAndOverflowsToInfinityIn16Bits) {
  const float largest = std::numeric_limits<float>::max();
  for (const auto& [dtype, to_bits, from_bits] : {std::tuple<DType, ToBits, FromBits>{DType::bf16, to_bf16_bits, from_bf16_bits},
                                                  {DType::f16, to_f16_bits, from_f16_bits}}) {
    const float big = dtype == DType::bf16 ? largest : 65504.0F;
    std::vector<std::uint16_t> a = {to_bits(NAN), to_bits(big), to_bits(-big), to_bits(1.0F)};
    std::vector<std::uint16_t> b = {to_bits(1.0F), to_bits(big), to_bits(-big), to_bits(NAN)};
    const std::array<const std::byte*, 2> sources = {bytes_of(a), bytes_of(b)};
    const std::array<std::byte*, 1> destinations = {bytes_of(a)};

    sum_in_order(dtype, sources, destinations, 4);

    EXPECT_TRUE(std::isnan(from_bits(a[0])));
    EXPECT_EQ(from_bits(a[1]), std::numeric_limits<float>::infinity());
    EXPECT_EQ(from_bits(a[2]), -std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(from_bits(a[3])));
  }
}

TEST(SumInOrder, WritesEveryDestinationOfWhichOneIsASource) {
  std::vector<float> a(5003, 1.5F), b(5003, 2.25F), c(5003, 0.0F);
  const std::array<const std::byte*, 2> sources = {bytes_of(a), bytes_of(b)};
  const std::array<std::byte*, 3> destinations = {bytes_of(a), bytes_of(b), bytes_of(c)};

  sum_in_order(DType::f32, sources, destinations, 5003);

  const std::vector<float> expected(5003, 3.75F);
  EXPECT_EQ(a, expected);
  EXPECT_EQ(b, expected);
  EXPECT_EQ(c, expected);
}

// Every number of sources that has a loop of its own, and some without; all kinds of destinations; lengths around a vector's.
void expect_same_bits(const SumVariant& variant, DType dtype, std::size_t num_sources, std::int64_t count) {
  const auto size = static_cast<std::size_t>(count) * size_bytes(dtype) + 1;
  std::vector<std::vector<std::uint8_t>> inputs(num_sources, std::vector<std::uint8_t>(size));
  for (std::size_t s = 0; s < num_sources; ++s) {
    for (std::size_t i = 0; i < size; ++i) inputs[s][i] = static_cast<std::uint8_t>((i * 7 + s * 31 + i / 3) % 120);
  }
  for (const bool to_all : {false, true}) {
    std::vector<std::vector<std::uint8_t>> got = inputs;
    std::vector<std::uint8_t> expected(size, 0xEE);
    std::vector<const std::byte*> sources, got_sources;
    std::vector<std::byte*> destinations;
    for (std::size_t s = 0; s < num_sources; ++s) {
      sources.push_back(bytes_of(inputs[s]) + 1);
      got_sources.push_back(bytes_of(got[s]) + 1);
      if (to_all || s == 0) destinations.push_back(bytes_of(got[s]) + 1);
    }
    std::vector<std::byte*> expected_destination = {bytes_of(expected) + 1};
    sum_variants().back().sum(dtype, sources, expected_destination, count);

    variant.sum(dtype, got_sources, destinations, count);

    for (std::size_t d = 0; d < destinations.size(); ++d) {
      ASSERT_EQ(std::memcmp(destinations[d], bytes_of(expected) + 1, size - 1), 0)
          << variant.instruction_set << ' ' << name(dtype) << ' ' << num_sources << " sources, " << count << " elements";
    }
  }
}

TEST(SumInOrder, GivesTheSameBitsWithEveryInstructionSet) {
  for (const SumVariant& variant : sum_variants()) {
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i64, DType::i32, DType::i16, DType::u8}) {
      for (const std::size_t num_sources : {1U, 2U, 3U, 4U, 5U, 7U}) {
        for (const std::int64_t count : {0, 1, 15, 16, 17, 64, 1009, 5003}) expect_same_bits(variant, dtype, num_sources, count);
      }
    }
  }
}

TEST(SumInOrder, OneSourceIsCopied) {
  std::vector<std::int32_t> a = {1, -2, 3}, b(3);
  const std::array<const std::byte*, 1> sources = {bytes_of(a)};
  const std::array<std::byte*, 1> destinations = {bytes_of(b)};

  sum_in_order(DType::i32, sources, destinations, 3);

  EXPECT_EQ(a, b);
}

}  // namespace
}  // namespace tandem
