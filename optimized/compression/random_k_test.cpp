// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/random_k.h"

#include <gtest/gtest.h>

#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/compression_test_support.h"

namespace tandem {
namespace {

TEST(RandomIndices, AreThoseOfTheReference) {
  for (const std::int64_t count : {1, 63, 64, 65, 1000, 20001}) {
    for (const std::int64_t k : {std::int64_t{0}, std::int64_t{1}, count / 3, count}) {
      EXPECT_EQ(random_indices(9, {4, 5}, k, count), reference::random_indices({9, 4, 5}, k, count)) << k << " of " << count;
    }
  }
}

TEST(RandomKCodec, MatchesTheReferenceExactlyAtEverySize) {
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const std::int64_t k : {0, 1, 50, 100000}) {
      const RandomKCodec codec(k, 21, set);
      for (const std::int64_t count : {0, 1, 2, 31, 1000, 5003}) {
        for (const auto& [kind, gradient] : inputs(count, 17)) {
          const std::string what = fmt::format("{} {} {} {}", name(set), codec.name(), count, kind);
          expect_matches_reference(
              codec,
              [&](auto g, auto r) {
                return reference::random_k<float>(g, r, k, {21, 0, 0});
              },
              gradient, what);
          if (HasFatalFailure()) return;
          ASSERT_EQ(codec.payload_bytes(count), reference::random_k_bytes(count, k)) << what;
        }
      }
    }
  }
}

TEST(RandomKCodec, PayloadsOfRanksAddUpValueByValue) {
  const RandomKCodec codec(20, 3);
  const CodecPosition position = {7, 2};
  const Result first = run(codec, normal_values(500, 1), {}, position), second = run(codec, normal_values(500, 2), {}, position);
  std::vector<std::byte> sum(first.payload.size());
  for (std::size_t i = 0; i < 20; ++i) {
    const float value = payload_value<float>(first.payload, i) + payload_value<float>(second.payload, i);
    std::memcpy(sum.data() + 4 * i, &value, sizeof value);
  }
  Floats decoded(500);
  codec.decompress(sum, decoded, position);
  for (std::size_t i = 0; i < decoded.size(); ++i) EXPECT_EQ(decoded[i], first.decompressed[i] + second.decompressed[i]) << i;
}

TEST(RandomKCodec, ChoosesOtherElementsInOtherStepsAndBuckets) {
  const RandomKCodec codec(20, 3);
  const Floats gradient = normal_values(500, 1);
  const Floats base = run(codec, gradient, {}, {7, 2}).decompressed;
  EXPECT_EQ(run(codec, gradient, {}, {7, 2}).decompressed, base);
  EXPECT_NE(run(codec, gradient, {}, {8, 2}).decompressed, base);
  EXPECT_NE(run(codec, gradient, {}, {7, 3}).decompressed, base);
  EXPECT_NE(run(RandomKCodec(20, 4), gradient, {}, {7, 2}).decompressed, base);
}

TEST(RandomKCodec, RefusesWhatIsNotFiniteInAnyPlace) {
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      for (const std::size_t at : {0UL, 500UL, 999UL}) {
        Floats gradient = normal_values(1000, 1);
        gradient[at] = bad;
        EXPECT_FALSE(run(RandomKCodec(3, 1, set), gradient, normal_values(1000, 2)).finite) << at;
      }
    }
  }
}

TEST(RandomKCodec, RefusesMoreElementsThanIndicesReach) {
  EXPECT_THROW(static_cast<void>(RandomKCodec(10, 1).payload_bytes(std::int64_t{1} << 31)), ContractError);
  EXPECT_THROW(RandomKCodec(-1, 1), ContractError);
}

}  // namespace
}  // namespace tandem
