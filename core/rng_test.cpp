// SPDX-License-Identifier: Apache-2.0
#include "core/rng.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

// Mean and standard deviation of a sample.
struct Moments {
  double mean = 0;
  double stddev = 0;
};

template <class Draw>
Moments moments_of(int count, Draw draw) {
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < count; ++i) {
    const double value = draw(static_cast<std::uint64_t>(i));
    sum += value;
    squares += value * value;
  }
  const double mean = sum / count;
  return {mean, std::sqrt(squares / count - mean * mean)};
}

TEST(Philox, ReproducesThePublishedVectors) {
  // kat_vectors of Random123, philox4x32 with 10 rounds.
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}), (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Fnv1a, ReproducesThePublishedVectors) {
  EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8ULL);
}

TEST(DropoutKey, WordIsThatOfTheDocumentedCounter) {
  const DropoutKey key{.seed = 0x0123456789abcdefULL, .step = 7, .layer = 3, .site = DropoutSite::mlp_residual};
  const std::uint64_t element = (std::uint64_t{5} << 34) + 4 * 11 + 2;  // block 5 * 2^32 + 11, word 2

  EXPECT_EQ(key.word(element), philox4x32({11, 5, 7, 3 * 8 + 3}, {0x89abcdef, 0x01234567})[2]);
}

TEST(DropoutKey, EveryPartOfTheIdentityChangesTheMask) {
  const DropoutKey base{.seed = 1, .step = 1, .layer = 1, .site = DropoutSite::attention_residual};
  std::vector<DropoutKey> keys(6, base);
  keys[1].seed = 2;
  keys[2].seed = 1 + (std::uint64_t{1} << 32);
  keys[3].step = 2;
  keys[4].layer = 2;
  keys[5].site = DropoutSite::mlp_residual;

  std::set<std::uint32_t> words;
  for (const DropoutKey& key : keys) words.insert(key.word(12345));

  EXPECT_EQ(words.size(), keys.size());
}

TEST(Dropout, DropsTheStatedShare) {
  for (const double probability : {0.1, 0.5, 0.9}) {
    const std::uint32_t threshold = dropout_threshold(probability);
    const DropoutKey key{.seed = 42, .step = 3, .layer = 5, .site = DropoutSite::attention_probability};
    constexpr int kElements = 200000;

    int dropped = 0;
    for (int i = 0; i < kElements; ++i) dropped += key.word(static_cast<std::uint64_t>(i)) < threshold ? 1 : 0;

    const double five_sigma = 5 * std::sqrt(probability * (1 - probability) / kElements);
    EXPECT_NEAR(dropped / static_cast<double>(kElements), probability, five_sigma);
  }
}

TEST(Dropout, ThresholdIsTheScaledProbability) {
  EXPECT_EQ(dropout_threshold(0.0), 0U);
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000U);
  EXPECT_EQ(dropout_threshold(std::nextafter(1.0, 0.0)), 0xFFFFFFFFU);
  EXPECT_THROW((void)dropout_threshold(1.0), ContractError);
  EXPECT_THROW((void)dropout_threshold(-0.1), ContractError);
}

TEST(ParameterNormal, IsStandardNormal) {
  constexpr int kCount = 200000;
  const Moments moments = moments_of(kCount, [](std::uint64_t i) { return parameter_normal(9, "h.0.mlp.c_fc.weight", i); });
  const Moments tails = moments_of(
      kCount, [](std::uint64_t i) { return std::abs(parameter_normal(9, "h.0.mlp.c_fc.weight", i)) > 1.959964 ? 1.0 : 0.0; });

  EXPECT_NEAR(moments.mean, 0.0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(moments.stddev, 1.0, 5 / std::sqrt(2.0 * kCount));
  EXPECT_NEAR(tails.mean, 0.05, 5 * std::sqrt(0.05 * 0.95 / kCount));
}

TEST(ParameterNormal, DependsOnSeedNameAndIndexAlone) {
  const double value = parameter_normal(1, "wte.weight", 100);
  EXPECT_EQ(parameter_normal(1, "wte.weight", 100), value);
  EXPECT_NE(parameter_normal(2, "wte.weight", 100), value);
  EXPECT_NE(parameter_normal(1, "wpe.weight", 100), value);
  EXPECT_NE(parameter_normal(1, "wte.weight", 101), value);
}

TEST(ParameterNormal, ValuesOfOneBlockAreUncorrelated) {
  constexpr int kPairs = 100000;
  const Moments products = moments_of(kPairs, [](std::uint64_t i) {
    return parameter_normal(3, "wpe.weight", 2 * i) * parameter_normal(3, "wpe.weight", 2 * i + 1);
  });
  EXPECT_NEAR(products.mean, 0.0, 5 / std::sqrt(kPairs));
}

TEST(CounterRng, ContinuesFromAnyPosition) {
  CounterRng whole(5, "sampler");
  std::vector<std::uint32_t> values;
  for (int i = 0; i < 50; ++i) values.push_back(whole.next_u32());

  for (std::uint64_t position = 0; position < 50; ++position) {
    CounterRng later(5, "sampler", position);
    EXPECT_EQ(later.position(), position);
    EXPECT_EQ(later.next_u32(), values[position]);
  }
  EXPECT_EQ(whole.position(), 50U);
}

TEST(CounterRng, StreamsAndSeedsAreSeparate) {
  std::set<std::uint64_t> values;
  for (const std::uint64_t seed : {1ULL, 2ULL, 1ULL << 32}) {
    for (const char* stream : {"sampler", "corpus", ""}) values.insert(CounterRng(seed, stream).next_u64());
  }
  EXPECT_EQ(values.size(), 9U);
}

TEST(CounterRng, NextBelowIsUniform) {
  CounterRng rng(11, "below");
  constexpr int kDraws = 210000;
  std::array<int, 7> counts{};
  for (int i = 0; i < kDraws; ++i) {
    const std::uint64_t value = rng.next_below(counts.size());
    ASSERT_LT(value, counts.size());
    ++counts[value];
  }

  double chi_squared = 0;
  const double expected = static_cast<double>(kDraws) / static_cast<double>(counts.size());
  for (const int count : counts) chi_squared += (count - expected) * (count - expected) / expected;
  EXPECT_LT(chi_squared, 35.0);  // 6 degrees of freedom: exceeded with probability 4e-6
}

TEST(CounterRng, NextBelowRejectsTheIncompleteTail) {
  // 3 * 2^62 is three quarters of the range: without rejection a third of the values would come up twice as often.
  const std::uint64_t bound = std::uint64_t{3} << 62;
  CounterRng rng(12, "tail");
  constexpr int kDraws = 30000;
  int low = 0;
  for (int i = 0; i < kDraws; ++i) low += rng.next_below(bound) < (std::uint64_t{1} << 62) ? 1 : 0;

  EXPECT_NEAR(low / static_cast<double>(kDraws), 1.0 / 3, 5 * std::sqrt(2.0 / 9 / kDraws));
  EXPECT_GT(rng.position(), 2U * kDraws);
}

TEST(CounterRng, NextBelowOneIsZero) {
  CounterRng rng(13, "one");
  for (int i = 0; i < 10; ++i) EXPECT_EQ(rng.next_below(1), 0U);
}

TEST(CounterRng, UnitAndNormalHaveTheirMoments) {
  CounterRng rng(14, "moments");
  constexpr int kCount = 100000;
  const Moments unit = moments_of(kCount, [&](std::uint64_t) {
    const double value = rng.next_unit();
    EXPECT_TRUE(value >= 0.0 && value < 1.0);
    return value;
  });
  const Moments normal = moments_of(kCount, [&](std::uint64_t) { return rng.next_normal(); });

  EXPECT_NEAR(unit.mean, 0.5, 5 * std::sqrt(1.0 / 12 / kCount));
  EXPECT_NEAR(unit.stddev, std::sqrt(1.0 / 12), 0.002);
  EXPECT_NEAR(normal.mean, 0.0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(normal.stddev, 1.0, 5 / std::sqrt(2.0 * kCount));
}

}  // namespace
}  // namespace tandem
