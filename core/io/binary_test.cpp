// SPDX-License-Identifier: Apache-2.0
#include "core/io/binary.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace tandem {

struct Pair {
  std::string text;
  std::vector<double> numbers;
  friend bool operator==(const Pair&, const Pair&) = default;
};
template <class Archive>
void serialize(Archive& archive, Pair& pair) {
  archive(pair.text, pair.numbers);
}

namespace {

TEST(Binary, BringsBackNestedValues) {
  const std::map<std::string, std::vector<Pair>> value = {{"a", {{"x\0y", {1.5, -0.0}}, {"", {}}}}, {"b", {}}};

  EXPECT_EQ((from_bytes<std::map<std::string, std::vector<Pair>>>(to_bytes(value))), value);
}

TEST(Binary, KeepsEveryBitOfANumber) {
  const double odd_nan = std::bit_cast<double>(std::uint64_t{0x7FF8000000000123});

  EXPECT_EQ(std::bit_cast<std::uint64_t>(from_bytes<double>(to_bytes(odd_nan))), 0x7FF8000000000123U);
}

TEST(Binary, RefusesBytesThatEndTooSoon) {
  std::string bytes = to_bytes(std::vector<double>{1, 2, 3});
  bytes.pop_back();

  EXPECT_THROW(static_cast<void>(from_bytes<std::vector<double>>(bytes)), ContractError);
}

}  // namespace
}  // namespace tandem
