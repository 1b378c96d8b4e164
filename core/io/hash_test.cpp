// SPDX-License-Identifier: Apache-2.0
#include "core/io/hash.h"

#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

std::vector<std::byte> some_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 37 + i / 251);
  return bytes;
}

TEST(Hash, OfNothingIsThePublishedValue) {
  EXPECT_EQ(hash64({}), 0x2d06800538d394c2U);
  EXPECT_EQ(to_hex(hash128({})), "99aa06d3014798d86001c324468d497f");
}

TEST(Hash, ChangesWithEveryBit) {
  std::vector<std::byte> bytes = some_bytes(300);
  const Hash128 before = hash128(bytes);
  const std::uint64_t before64 = hash64(bytes);

  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= std::byte{1};
    EXPECT_NE(hash128(bytes), before) << i;
    EXPECT_NE(hash64(bytes), before64) << i;
    bytes[i] ^= std::byte{1};
  }
}

TEST(Hash, DependsOnTheSeed) {
  const std::vector<std::byte> bytes = some_bytes(10);

  EXPECT_NE(hash64(bytes, 1), hash64(bytes, 2));
}

TEST(Hasher128, EqualsTheHashInOnePiece) {
  const std::vector<std::byte> bytes = some_bytes(10'000);
  for (const std::size_t piece : {1U, 7U, 256U, 4096U}) {
    Hasher128 hasher;

    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      hasher.update(std::span(bytes).subspan(at, std::min(piece, bytes.size() - at)));
    }

    EXPECT_EQ(hasher.digest(), hash128(bytes)) << "pieces of " << piece;
  }
}

TEST(Hasher128, DigestDoesNotEndIt) {
  const std::vector<std::byte> bytes = some_bytes(20);
  Hasher128 hasher;
  hasher.update(std::span(bytes).first(5));

  EXPECT_EQ(hasher.digest(), hash128(std::span(bytes).first(5)));
  hasher.update(std::span(bytes).subspan(5));

  EXPECT_EQ(hasher.digest(), hash128(bytes));
}

TEST(Hash, HexIsReadBack) {
  const Hash128 hash = {0x0123456789abcdefU, 0x1U};

  EXPECT_EQ(to_hex(hash), "0123456789abcdef0000000000000001");
  EXPECT_EQ(parse_hash128(to_hex(hash)), hash);
  EXPECT_THROW((void)parse_hash128("0123"), InputError);
  EXPECT_THROW((void)parse_hash128("0123456789abcdef000000000000000g"), InputError);
}

}  // namespace
}  // namespace tandem
