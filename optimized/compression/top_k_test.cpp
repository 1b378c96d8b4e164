// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/compression_test_support.h"

namespace tandem {
namespace {

std::vector<std::int32_t> indices_of(const std::vector<std::byte>& payload) {
  std::vector<std::int32_t> indices;
  for (std::size_t i = 0; i < payload.size() / 8; ++i) indices.push_back(payload_value<std::int32_t>(payload, i));
  return indices;
}

TEST(TopKCodec, MatchesTheReferenceExactlyAtEverySize) {
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const std::int64_t k : {0, 1, 3, 50, 1000, 100000}) {
      const TopKCodec codec(k, set);
      for (const std::int64_t count : {0, 1, 2, 31, 32, 33, 1000, 5003}) {
        for (const auto& [kind, gradient] : inputs(count, 13)) {
          const std::string what = fmt::format("{} {} {} {}", name(set), codec.name(), count, kind);
          expect_matches_reference(
              codec, [&](auto g, auto r) { return reference::top_k<float>(g, r, k); }, gradient, what);
          if (HasFatalFailure()) return;
          ASSERT_EQ(codec.payload_bytes(count), reference::top_k_bytes(count, k)) << what;
        }
      }
    }
  }
}

TEST(TopKCodec, SelectsExactlyWhereOnlyASampleSetTheThreshold) {
  constexpr std::int64_t kCount = 150001;
  for (const std::int64_t k : {1, 700, 15000, 149000}) {
    for (const auto& [kind, gradient] : inputs(kCount, 14)) {
      expect_matches_reference(
          TopKCodec(k), [&](auto g, auto r) { return reference::top_k<float>(g, r, k); }, gradient,
          fmt::format("k {} {}", k, kind));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(TopKCodec, RecoversFromASampleThatMisled) {
  // The sample takes elements in distances of four: only those are large, and there are fewer of them than k.
  Floats gradient = normal_values(131072, 15, 1e-3);
  for (std::size_t i = 0; i < gradient.size(); i += 4) gradient[i] = 5.0F + gradient[i];
  constexpr std::int64_t kMany = 40000;
  expect_matches_reference(
      TopKCodec(kMany), [](auto g, auto r) { return reference::top_k<float>(g, r, kMany); }, gradient, "misled");
}

TEST(TopKCodec, RoundTripsEverythingWhenKIsAll) {
  for (const std::int64_t count : {32767, 32768, 65537}) {
    const Floats gradient = normal_values(count, 16);
    const Result result = run(TopKCodec(count), gradient, {});
    EXPECT_EQ(result.decompressed, gradient);
    std::vector<std::int32_t> all(static_cast<std::size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(indices_of(result.payload), all) << "indices do not wrap";
  }
}

TEST(TopKCodec, RefusesMoreElementsThanIndicesReach) {
  EXPECT_EQ(TopKCodec(10).payload_bytes((std::int64_t{1} << 31) - 1), 80);
  EXPECT_THROW(static_cast<void>(TopKCodec(10).payload_bytes(std::int64_t{1} << 31)), ContractError);
}

TEST(TopKCodec, RefusesWhatIsNotFiniteInAnyPlace) {
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const std::int64_t k : {0, 1, 100}) {
      for (const float bad : {INFINITY, -INFINITY, NAN, -NAN}) {
        for (const std::size_t at : {0UL, 2047UL, 2048UL, 2999UL}) {
          Floats gradient = normal_values(3000, 1);
          gradient[at] = bad;
          EXPECT_FALSE(run(TopKCodec(k, set), gradient, normal_values(3000, 2)).finite) << at;
        }
      }
    }
  }
}

TEST(TopKCodec, RefusesAPayloadThatNamesAnElementOutside) {
  Result result = run(TopKCodec(2), normal_values(10, 1), {});
  const std::int32_t outside = 10;
  std::memcpy(result.payload.data() + 4, &outside, sizeof outside);
  EXPECT_THROW(TopKCodec(2).decompress(result.payload, result.decompressed, {}), ContractError);
}

TEST(TopKCodec, FollowsTheRecordedTraceExactly) {
  if (!std::filesystem::exists(golden_pieces())) GTEST_SKIP() << "no golden pieces at " << golden_pieces().string();
  const SafetensorsFile file(golden_pieces() / "topk_error_feedback.safetensors");
  const auto number = [&](const char* key) { return std::stoll(file.metadata().at(key)); };
  const std::int64_t steps = number("steps"), n = number("n"), k = number("k");
  const auto gradients = file.read_as<float>("grad"), residuals = file.read_as<float>("residual");
  const auto values = file.read_as<float>("values");
  const auto indices = file.read_as<std::int32_t>("indices");
  Floats residual(static_cast<std::size_t>(n));

  for (std::int64_t step = 0; step < steps; ++step) {
    const Floats gradient(gradients.begin() + step * n, gradients.begin() + (step + 1) * n);
    const Result got = run(TopKCodec(k), gradient, residual);
    ASSERT_TRUE(got.finite);
    EXPECT_EQ(indices_of(got.payload), std::vector<std::int32_t>(indices.begin() + step * k, indices.begin() + (step + 1) * k));
    for (std::int64_t i = 0; i < k; ++i) {
      EXPECT_EQ(payload_value<float>(got.payload, static_cast<std::size_t>(k + i)),
                values[static_cast<std::size_t>(step * k + i)]);
    }
    EXPECT_EQ(got.residual, Floats(residuals.begin() + step * n, residuals.begin() + (step + 1) * n));
    residual = got.residual;
  }
}

}  // namespace
}  // namespace tandem
