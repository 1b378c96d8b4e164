// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/block_quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/compression_test_support.h"

namespace tandem {
namespace {

/// The code of element `i`, read from the packed bytes by the definition of the layout.
int packed_code(const std::vector<std::byte>& payload, int bits, std::int64_t block, std::int64_t elements, std::int64_t i) {
  const std::int64_t scales = 4 * ((elements + block - 1) / block);
  if (bits == 8) return static_cast<std::int8_t>(payload[static_cast<std::size_t>(scales + i)]);
  const std::int64_t at = scales + i / block * ((block + 1) / 2) + i % block / 2;
  const int byte = std::to_integer<int>(payload[static_cast<std::size_t>(at)]);
  const int nibble = i % block % 2 == 0 ? byte & 15 : byte >> 4;
  return nibble < 8 ? nibble : nibble - 16;
}

void expect_packed(const BlockQuantizeCodec& codec, int bits, std::int64_t block, const Floats& gradient,
                   const std::string& what) {
  const auto count = static_cast<std::int64_t>(gradient.size());
  const auto expected = reference::quantize_blocks<float>(gradient, {}, bits, block);
  const Result got = run(codec, gradient, {});
  ASSERT_EQ(got.finite, expected.finite) << what;
  if (!expected.finite) return;
  ASSERT_EQ(static_cast<std::int64_t>(got.payload.size()), reference::quantized_bytes(count, bits, block)) << what;
  for (std::size_t b = 0; b < expected.values.size(); ++b) {
    ASSERT_EQ(payload_value<float>(got.payload, b), expected.values[b]) << what << " scale " << b;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    ASSERT_EQ(packed_code(got.payload, bits, block, count, i), expected.codes[static_cast<std::size_t>(i)]) << what << " " << i;
  }
}

class BlockQuantize : public testing::TestWithParam<int> {};

TEST_P(BlockQuantize, MatchesTheReferenceBitForBitAtEverySizeAndBlock) {
  const int bits = GetParam();
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const std::int64_t block : {1, 2, 3, 15, 31, 64, 256, 2500}) {
      const BlockQuantizeCodec codec(bits, block, set);
      for (const std::int64_t count : {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 129, 1027, 5003}) {
        if (count > 200 && block < 3) continue;
        for (const auto& [kind, gradient] : inputs(count, 11)) {
          const std::string what = fmt::format("{} {} {} {}", name(set), codec.name(), count, kind);
          expect_matches_reference(
              codec, [&](auto g, auto r) { return reference::quantize_blocks<float>(g, r, bits, block); }, gradient, what);
          expect_packed(codec, bits, block, gradient, what);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(BlockQuantize, RefusesWhatIsNotFiniteInAnyPlace) {
  const auto old = normal_values(150, 2);
  for (const InstructionSet set : usable_instruction_sets()) {
    const BlockQuantizeCodec codec(GetParam(), 64, set);
    for (const float bad : {INFINITY, -INFINITY, NAN, -NAN}) {
      for (const std::size_t at : {0UL, 63UL, 64UL, 149UL}) {
        Floats gradient = normal_values(150, 1);
        gradient[at] = bad;
        EXPECT_FALSE(run(codec, gradient, old).finite) << at;
      }
    }
  }
}

TEST_P(BlockQuantize, RefusesABlockThatWouldDecodeToInfinity) {
  const Floats largest = {std::numeric_limits<float>::max(), 1.0F};
  EXPECT_EQ(run(BlockQuantizeCodec(GetParam(), 8), largest, {}).finite, GetParam() == 4) << "127 (max / 127) rounds up";
}

TEST_P(BlockQuantize, PayloadOfABufferCutBetweenBlocksIsThatOfItsParts) {
  const BlockQuantizeCodec codec(GetParam(), 15);
  const Floats whole = normal_values(100, 4);
  const Floats head(whole.begin(), whole.begin() + 45), tail(whole.begin() + 45, whole.end());

  const Result of_whole = run(codec, whole, {}), of_head = run(codec, head, {}), of_tail = run(codec, tail, {});

  Floats joined = of_head.decompressed;
  joined.insert(joined.end(), of_tail.decompressed.begin(), of_tail.decompressed.end());
  EXPECT_EQ(joined, of_whole.decompressed);
  EXPECT_EQ(of_head.payload.size() + of_tail.payload.size(), of_whole.payload.size());
}

TEST_P(BlockQuantize, IsWithinHalfAQuantumAtEverySmallSizeUpToTheLastElement) {
  const BlockQuantizeCodec codec(GetParam(), 4);
  const float levels = GetParam() == 8 ? 127.0F : 7.0F;
  for (std::int64_t count = 1; count <= 13; ++count) {
    const Floats gradient = normal_values(count, static_cast<std::uint64_t>(count));
    const Result result = run(codec, gradient, {});
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      float largest = 0.0F;
      for (std::size_t j = i / 4 * 4; j < std::min(gradient.size(), i / 4 * 4 + 4); ++j) {
        largest = std::max(largest, std::abs(gradient[j]));
      }
      EXPECT_LE(std::abs(result.decompressed[i] - gradient[i]), 0.50001F * largest / levels) << count << " " << i;
    }
  }
}

TEST_P(BlockQuantize, GivesLargeBuffersTheSameResidualInSeparateMemoryAsInPlace) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 21) + 1003;
  const BlockQuantizeCodec codec(GetParam(), 1500);
  const Floats gradient = normal_values(kCount, 4);
  Floats in_place = normal_values(kCount, 5), memory(kCount + 1, 777.0F);
  const std::span<float> separate = std::span(memory).subspan(1);  // not aligned to vectors
  std::vector<std::byte> first(static_cast<std::size_t>(codec.payload_bytes(kCount))), second = first;

  ASSERT_TRUE(codec.compress({.gradient = gradient, .residual = in_place, .new_residual = separate, .payload = first}));
  ASSERT_TRUE(codec.compress({.gradient = gradient, .residual = in_place, .new_residual = in_place, .payload = second}));

  EXPECT_TRUE(first == second);
  EXPECT_TRUE(std::ranges::equal(separate, in_place));
}

INSTANTIATE_TEST_SUITE_P(Bits, BlockQuantize, testing::Values(8, 4),
                         [](const auto& instance) { return fmt::format("int{}", instance.param); });

TEST(BlockQuantizeCodec, FollowsTheRecordedTraceOfInt8WithErrorFeedback) {
  if (!std::filesystem::exists(golden_pieces())) GTEST_SKIP() << "no golden pieces at " << golden_pieces().string();
  const SafetensorsFile file(golden_pieces() / "int8_error_feedback.safetensors");
  const auto number = [&](const char* key) { return static_cast<std::size_t>(std::stoll(file.metadata().at(key))); };
  const std::size_t steps = number("steps"), n = number("n"), block = number("block"), blocks = (n + block - 1) / block;
  const auto gradients = file.read_as<float>("grad"), residuals = file.read_as<float>("residual");
  const auto scales = file.read_as<float>("scale");
  const auto codes = file.read_as<std::int32_t>("q");
  const BlockQuantizeCodec codec(8, static_cast<std::int64_t>(block));
  Floats residual(n);

  for (std::size_t step = 0; step < steps; ++step) {
    const Floats gradient(gradients.begin() + static_cast<std::ptrdiff_t>(step * n),
                          gradients.begin() + static_cast<std::ptrdiff_t>((step + 1) * n));
    const Result got = run(codec, gradient, residual);
    ASSERT_TRUE(got.finite);
    for (std::size_t i = 0; i < n; ++i) {
      const float scale = scales[step * blocks + i / block];
      ASSERT_EQ(payload_value<std::int8_t>(got.payload, i, 4 * blocks), codes[step * n + i]) << step << " " << i;
      ASSERT_LE(std::abs(got.residual[i] - residuals[step * n + i]), 2e-7F * 127.0F * scale) << step << " " << i;
    }
    residual = got.residual;
  }
}

TEST(BlockQuantizeCodec, ChecksSizes) {
  EXPECT_THROW(BlockQuantizeCodec(5, 64), ContractError);
  EXPECT_THROW(BlockQuantizeCodec(8, 0), ContractError);
  const BlockQuantizeCodec codec(8, 64);
  Floats gradient(10), residual(10), other(9);
  std::vector<std::byte> payload(14), small(13);
  const auto compress = [&](std::span<const float> old, std::span<float> next, std::span<std::byte> to) {
    return codec.compress({.gradient = gradient, .residual = old, .new_residual = next, .payload = to});
  };
  EXPECT_TRUE(compress(residual, residual, payload));
  EXPECT_THROW(static_cast<void>(compress(residual, residual, small)), ContractError);
  EXPECT_THROW(static_cast<void>(compress(other, residual, payload)), ContractError);
  EXPECT_THROW(static_cast<void>(compress(residual, other, payload)), ContractError);
  EXPECT_THROW(static_cast<void>(compress(residual, {}, payload)), ContractError) << "the residual would be lost";
  EXPECT_THROW(codec.decompress(small, gradient, {}), ContractError);
}

}  // namespace
}  // namespace tandem
