// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/error_feedback.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/error.h"
#include "optimized/compression/block_quantize.h"
#include "optimized/compression/compression_test_support.h"
#include "optimized/compression/random_k.h"
#include "optimized/compression/sign.h"
#include "optimized/compression/top_k.h"

namespace tandem {
namespace {

using Layout = std::vector<ResidualTensor>;
/// First and last parameter (exclusive) of each bucket.
using Buckets = std::vector<std::pair<std::size_t, std::size_t>>;

const Layout kLayout = {{"wte", 70}, {"bias", 3}, {"weight", 129}, {"ln", 0}, {"head", 31}};

Floats gradient_of(const std::string& name, std::int64_t elements, std::int64_t step) {
  return normal_values(elements, fnv1a(name) + static_cast<std::uint64_t>(step), 0.5);
}

/// A rank that keeps books: what its parameters were given and what was sent, in double.
class Rank {
 public:
  Rank(Arena& arena, const Codec& codec) : codec_(codec), feedback_(arena, kLayout) {
    for (const auto& [name, elements] : kLayout)
      given_[name] = sent_[name] = std::vector<double>(static_cast<std::size_t>(elements));
  }

  ErrorFeedback& feedback() { return feedback_; }

  /// Compresses all buckets; false where one of them was not finite. `bad` makes an element of weight so.
  bool compress(std::int64_t step, const Buckets& buckets, float bad = 0.0F) {
    pending_.clear();
    std::int64_t first = 0;
    bool finite = true;
    for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
      Floats gradient;
      for (std::size_t i = buckets[bucket].first; i < buckets[bucket].second; ++i) {
        const auto& [name, elements] = feedback_.layout()[i];
        Floats part = gradient_of(name, elements, step);
        if (name == "weight") part[100] += bad;
        gradient.insert(gradient.end(), part.begin(), part.end());
      }
      const auto count = static_cast<std::int64_t>(gradient.size());
      std::vector<std::byte> payload(static_cast<std::size_t>(codec_.payload_bytes(count)));
      const CodecPosition position = {step, static_cast<std::int64_t>(bucket)};
      finite = feedback_.compress(codec_, first, gradient, payload, position) && finite;
      Floats decoded(gradient.size());
      if (finite) codec_.decompress(payload, decoded, position);
      pending_.insert(pending_.end(), decoded.begin(), decoded.end());
      first += count;
    }
    return finite;
  }

  void commit(std::int64_t step) {
    feedback_.commit();
    std::size_t at = 0;
    for (const auto& [name, elements] : feedback_.layout()) {
      const Floats gradient = gradient_of(name, elements, step);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        given_[name][i] += gradient[i];
        sent_[name][i] += pending_[at++];
      }
    }
  }

  /// |given - sent - residual| of a parameter is only the rounding of gradient + residual and, where a codec has one, of the
  /// residual itself, in each step: below 2^-23 of numbers smaller than 8.
  void expect_conserved(std::int64_t steps, const std::string& what) {
    for (const auto& [name, elements] : kLayout) {
      const std::span<const float> residual = feedback_.residual(name);
      for (std::size_t i = 0; i < residual.size(); ++i) {
        const double lost = given_[name][i] - sent_[name][i] - static_cast<double>(residual[i]);
        ASSERT_LE(std::abs(lost), static_cast<double>(steps) * 8 * 0x1p-23) << what << " " << name << " " << i;
      }
    }
  }

 private:
  const Codec& codec_;
  ErrorFeedback feedback_;
  std::map<std::string, std::vector<double>> given_, sent_;
  Floats pending_;
};

std::vector<std::unique_ptr<Codec>> codecs() {
  std::vector<std::unique_ptr<Codec>> list;
  list.push_back(std::make_unique<BlockQuantizeCodec>(8, 64));
  list.push_back(std::make_unique<BlockQuantizeCodec>(4, 15));
  list.push_back(std::make_unique<SignCodec>(32));
  list.push_back(std::make_unique<TopKCodec>(40));
  list.push_back(std::make_unique<RandomKCodec>(60, 5));
  return list;
}

std::map<std::string, Floats> saved(const ErrorFeedback& feedback) {
  std::map<std::string, Floats> state;
  for (const ResidualTensor& tensor : feedback.layout()) {
    const std::span<const float> residual = feedback.residual(tensor.name);
    state[tensor.name] = Floats(residual.begin(), residual.end());
  }
  return state;
}

TEST(ErrorFeedback, ConservesPerParameterAcrossSkippedStepsRebuiltBucketsAndARestore) {
  const Buckets first = {{0, 2}, {2, 5}}, rebuilt = {{0, 1}, {1, 4}, {4, 5}};
  for (const auto& codec : codecs()) {
    Arena arena;
    Rank rank(arena, *codec);
    std::int64_t committed = 0;
    for (std::int64_t step = 0; step < 8; ++step) {
      const bool skipped_here = step == 2, skipped_elsewhere = step == 5;
      const auto before = saved(rank.feedback());
      ASSERT_EQ(rank.compress(step, step < 4 ? first : rebuilt, skipped_here ? INFINITY : 0.0F), !skipped_here);
      if (skipped_here || skipped_elsewhere) {
        rank.feedback().discard();
        EXPECT_EQ(saved(rank.feedback()), before) << codec->name() << ": a skipped step keeps the residual";
      } else {
        rank.commit(step);
        ++committed;
      }
      if (step == 6) {
        const auto state = saved(rank.feedback());
        for (const auto& [name, values] : state) rank.feedback().restore(name, Floats(values.size(), 99.0F));
        EXPECT_NE(saved(rank.feedback()), state);
        for (const auto& [name, values] : state) rank.feedback().restore(name, values);
      }
      rank.expect_conserved(committed, codec->name());
      if (HasFatalFailure()) return;
    }
    EXPECT_NE(saved(rank.feedback()).at("weight"), Floats(129)) << codec->name() << " kept nothing: nothing was tested";
  }
}

TEST(ErrorFeedback, RefusesAStepInWhichABucketWasForgottenOrCompressedTwice) {
  Arena arena;
  ErrorFeedback feedback(arena, {{"a", 10}, {"b", 20}});
  const BlockQuantizeCodec codec(8, 64);
  std::vector<std::byte> payload(static_cast<std::size_t>(codec.payload_bytes(10)));
  const Floats gradient = normal_values(10, 1);
  ASSERT_TRUE(feedback.compress(codec, 10, gradient, payload, {}));
  EXPECT_THROW(feedback.commit(), ContractError);
  EXPECT_THROW(static_cast<void>(feedback.begin(15, 1)), ContractError);
  EXPECT_THROW(static_cast<void>(feedback.begin(5, 6)), ContractError);
  EXPECT_THROW(static_cast<void>(feedback.begin(25, 6)), ContractError) << "beyond the end";
  EXPECT_THROW(static_cast<void>(feedback.residual("a")), ContractError) << "in the middle of a step";
  static_cast<void>(feedback.begin(20, 10));
  static_cast<void>(feedback.begin(0, 10));
  feedback.commit();
}

TEST(ErrorFeedback, RefusesToCommitAStepThatWasNotFinite) {
  Arena arena;
  ErrorFeedback feedback(arena, {{"a", 3}});
  const TopKCodec codec(1);
  std::vector<std::byte> payload(8);
  const Floats bad = {1.0F, NAN, 2.0F}, good = {1.0F, -3.0F, 2.0F};
  EXPECT_FALSE(feedback.compress(codec, 0, bad, payload, {}));
  EXPECT_THROW(feedback.commit(), ContractError);
  feedback.discard();
  EXPECT_TRUE(feedback.compress(codec, 0, good, payload, {}));
  feedback.commit();
  const std::span<const float> residual = feedback.residual("a");
  EXPECT_EQ(Floats(residual.begin(), residual.end()), (Floats{1.0F, 0.0F, 2.0F}));
}

TEST(ErrorFeedback, RefusesAnotherSetOfParameters) {
  Arena arena;
  ErrorFeedback feedback(arena, {{"a", 3}, {"b", 4}});
  EXPECT_THROW(feedback.restore("a", Floats(4)), ContractError);
  EXPECT_THROW(feedback.restore("c", Floats(4)), ContractError);
  EXPECT_THROW(ErrorFeedback(arena, {{"a", 3}, {"a", 4}}), ContractError);
}

TEST(ErrorFeedback, WorksWithoutAnyElements) {
  Arena arena;
  ErrorFeedback feedback(arena, {});
  feedback.commit();
}

}  // namespace
}  // namespace tandem
