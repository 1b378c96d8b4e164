// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/sign.h"

#include <gtest/gtest.h>

#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/compression_test_support.h"

namespace tandem {
namespace {

TEST(SignCodec, MatchesTheReferenceBitForBitAtEverySizeAndBlock) {
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const std::int64_t block : {1, 7, 16, 24, 31, 256, 2500}) {
      const SignCodec codec(block, set);
      for (const std::int64_t count : {0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 129, 1027, 5003}) {
        if (count > 200 && block < 7) continue;
        for (const auto& [kind, gradient] : inputs(count, 12)) {
          expect_matches_reference(
              codec, [&](auto g, auto r) { return reference::sign_blocks<float>(g, r, block); }, gradient,
              fmt::format("{} {} {} {}", name(set), codec.name(), count, kind));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(SignCodec, PacksScalesThenABitPerElement) {
  const Floats gradient = {1.0F, -3.0F, 0.0F, -0.0F, 5.0F, -5.0F, -5.0F, 5.0F, -5.0F, 2.0F, -4.0F};
  const Result result = run(SignCodec(9), gradient, {});
  ASSERT_EQ(result.payload.size(), 2 * 4 + 2 + 1U);
  EXPECT_EQ(static_cast<std::int64_t>(result.payload.size()), reference::sign_bytes(11, 9));
  EXPECT_EQ(payload_value<float>(result.payload, 0), 29.0F / 9.0F);
  EXPECT_EQ(payload_value<float>(result.payload, 1), 3.0F);
  EXPECT_EQ(result.payload[8], std::byte{0b01101010});
  EXPECT_EQ(result.payload[9], std::byte{1}) << "unused bits are zero";
  EXPECT_EQ(result.payload[10], std::byte{2}) << "a block begins with a new byte";
}

TEST(SignCodec, RefusesWhatIsNotFiniteInAnyPlace) {
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const float bad : {INFINITY, -INFINITY, NAN, -NAN}) {
      for (const std::size_t at : {0UL, 63UL, 64UL, 149UL}) {
        Floats gradient = normal_values(150, 1);
        gradient[at] = bad;
        EXPECT_FALSE(run(SignCodec(64, set), gradient, normal_values(150, 2)).finite) << at;
      }
    }
  }
}

TEST(SignCodec, LosesAtMostARoundingOfTheResidual) {
  const Floats gradient = normal_values(1000, 5), old = normal_values(1000, 6, 3.0);
  const Result result = run(SignCodec(100), gradient, old);
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float c = gradient[i] + old[i];
    const double lost = static_cast<double>(result.decompressed[i]) + static_cast<double>(result.residual[i]) - c;
    EXPECT_LE(std::abs(lost), 0x1p-24 * std::abs(result.residual[i])) << i;
  }
}

TEST(SignCodec, ChecksItsBlock) { EXPECT_THROW(SignCodec(0), ContractError); }

}  // namespace
}  // namespace tandem
