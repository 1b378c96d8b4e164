// SPDX-License-Identifier: Apache-2.0
#include "core/synthetic_corpus.h"

#include <cmath>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"

namespace tandem {
namespace {

TEST(SyntheticCorpus, EveryRowOfProbabilitiesHasTheEntropyRate) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    const SyntheticCorpus corpus({.vocabulary = 31, .branching = 7, .seed = seed});
    for (std::int32_t symbol = 0; symbol < 31; ++symbol) {
      double entropy = 0;
      double total = 0;
      for (std::int32_t next = 0; next < 31; ++next) {
        const double p = corpus.probability(symbol, next);
        total += p;
        if (p > 0) entropy -= p * std::log(p);
      }
      EXPECT_EQ(total, 1.0) << "multiples of 2^-32 add up exactly";
      EXPECT_NEAR(entropy, corpus.entropy_rate_nats(), 1e-14);
    }
  }
}

TEST(SyntheticCorpus, EntropyRateIsThatOfTheZipfRow) {
  double harmonic = 0;
  double weighted_log = 0;
  for (int j = 1; j <= 8; ++j) {
    harmonic += 1.0 / j;
    weighted_log += std::log(j) / j;
  }

  EXPECT_NEAR(SyntheticCorpus({}).entropy_rate_nats(), weighted_log / harmonic + std::log(harmonic), 1e-8);
  EXPECT_EQ(SyntheticCorpus({.branching = 1}).entropy_rate_nats(), 0.0);
}

TEST(SyntheticCorpus, EveryColumnAddsUpToOneSoThatSymbolsAreEquallyLikely) {
  const SyntheticCorpus corpus({.vocabulary = 20, .branching = 5});
  for (std::int32_t next = 0; next < 20; ++next) {
    double column = 0;
    for (std::int32_t symbol = 0; symbol < 20; ++symbol) column += corpus.probability(symbol, next);
    EXPECT_EQ(column, 1.0);
  }
}

/// Mean of -ln P(target | id) over n targets: its expectation is H, and its deviation at most the spread of -ln q over sqrt(n).
TEST(SyntheticCorpus, SampledTargetsCostTheEntropyRate) {
  const SyntheticCorpus corpus({.vocabulary = 32, .branching = 8, .sequence = 128, .seed = 5});
  double sum = 0;
  double squares = 0;
  std::int64_t count = 0;
  for (std::int64_t step = 0; step < 40; ++step) {
    const Batch batch = corpus.training_batch(step, 32);
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      const double nats = -std::log(corpus.probability(batch.ids[i], batch.targets[i]));
      sum += nats;
      squares += nats * nats;
      ++count;
    }
  }
  const double mean = sum / static_cast<double>(count);
  const double deviation = std::sqrt((squares / static_cast<double>(count) - mean * mean) / static_cast<double>(count));

  EXPECT_NEAR(mean, corpus.entropy_rate_nats(), 5 * deviation);
  EXPECT_LT(5 * deviation, 0.01) << "too few samples to tell";
}

TEST(SyntheticCorpus, CountsOfPairsFollowTheProbabilities) {
  const SyntheticCorpus corpus({.vocabulary = 8, .branching = 4, .sequence = 256, .seed = 9});
  std::map<std::pair<std::int32_t, std::int32_t>, double> pairs;
  std::map<std::int32_t, double> symbols;
  for (std::int64_t step = 0; step < 20; ++step) {
    const Batch batch = corpus.training_batch(step, 16);
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      pairs[{batch.ids[i], batch.targets[i]}] += 1;
      symbols[batch.ids[i]] += 1;
    }
  }

  for (std::int32_t symbol = 0; symbol < 8; ++symbol) {
    for (std::int32_t next = 0; next < 8; ++next) {
      const double p = corpus.probability(symbol, next);
      const double n = symbols[symbol];
      EXPECT_NEAR((pairs[{symbol, next}]) / n, p, 5 * std::sqrt(p * (1 - p) / n)) << symbol << " to " << next;
    }
  }
}

TEST(SyntheticCorpus, FirstSymbolsCoverTheVocabulary) {
  const SyntheticCorpus corpus({.vocabulary = 16, .sequence = 4});
  const Batch batch = corpus.training_batch(0, 512);
  std::set<std::int32_t> first;
  for (std::int64_t row = 0; row < batch.rows; ++row) first.insert(batch.ids[static_cast<std::size_t>(row * 4)]);

  EXPECT_EQ(first.size(), 16U);
}

TEST(SyntheticCorpus, TargetsAreTheNextTokens) {
  const Batch batch = SyntheticCorpus({.sequence = 33}).training_batch(3, 5);
  for (std::size_t i = 0; i + 1 < batch.ids.size(); ++i) {
    if ((i + 1) % 33 != 0) {
      EXPECT_EQ(batch.targets[i], batch.ids[i + 1]) << i;
    }
  }
  EXPECT_EQ(batch.valid_tokens(), 5 * 33);
  EXPECT_NO_THROW(validate_tokens(batch, 64));
}

TEST(SyntheticCorpus, RowsDoNotDependOnWhoAsksForThem) {
  for (const RowShape shape : {RowShape::full, RowShape::skewed, RowShape::packed}) {
    const SyntheticCorpus corpus({.row_shape = shape});
    const Batch whole = corpus.training_batch(7, 10);
    for (const Interval rows : {Interval{0, 3}, Interval{3, 3}, Interval{3, 10}}) {
      const Batch part = corpus.training_rows(7, 10, rows);
      const Batch expected = slice_rows(whole, rows.begin, rows.size());
      EXPECT_EQ(part.ids, expected.ids);
      EXPECT_EQ(part.targets, expected.targets);
      EXPECT_EQ(part.positions, expected.positions);
      EXPECT_EQ(part.document_starts, expected.document_starts);
      EXPECT_EQ(part.row_ids, expected.row_ids);
    }
  }
}

TEST(SyntheticCorpus, RowsStepsSeedsAndPartsDiffer) {
  const SyntheticCorpus corpus({});
  const Batch batch = corpus.training_batch(0, 2);

  EXPECT_NE(slice_rows(batch, 0, 1).ids, slice_rows(batch, 1, 1).ids);
  EXPECT_NE(batch.ids, corpus.training_batch(1, 2).ids);
  EXPECT_NE(batch.ids, corpus.validation_batch(0, 2)->ids);
  EXPECT_NE(batch.ids, SyntheticCorpus({.seed = 2}).training_batch(0, 2).ids);
}

TEST(SyntheticCorpus, SkewedRowsHaveVeryDifferentCountsAndPaddedTails) {
  const SyntheticCorpus corpus({.sequence = 64, .row_shape = RowShape::skewed});
  const Batch batch = corpus.training_batch(0, 64);
  std::int64_t least = 64;
  std::int64_t most = 0;
  for (std::int64_t row = 0; row < 64; ++row) {
    const Batch one = slice_rows(batch, row, 1);
    const std::int64_t valid = one.valid_tokens();
    least = std::min(least, valid);
    most = std::max(most, valid);
    for (std::int64_t t = 0; t < 64; ++t) {
      const auto at = static_cast<std::size_t>(t);
      EXPECT_EQ(one.targets[at] == kIgnoredTarget, t >= valid);
      if (t >= valid) {
        EXPECT_EQ(one.ids[at], 0);
      }
    }
  }

  EXPECT_GE(least, 1);
  EXPECT_LE(least, 5);
  EXPECT_GE(most, 50);
}

TEST(SyntheticCorpus, PackedRowsRestartAtEachDocumentAndFillTheRow) {
  const SyntheticCorpus corpus({.sequence = 64, .row_shape = RowShape::packed});
  const Batch batch = corpus.training_batch(0, 32);
  std::int64_t documents = 0;
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const auto t = static_cast<std::int32_t>(i % 64);
    const bool last_of_document = t == 63 || batch.document_starts[i + 1] == t + 1;
    documents += last_of_document ? 1 : 0;
    EXPECT_EQ(batch.positions[i], t - batch.document_starts[i]);
    EXPECT_EQ(batch.targets[i] == kIgnoredTarget, last_of_document);
    if (!last_of_document) {
      EXPECT_EQ(batch.targets[i], batch.ids[i + 1]);
      EXPECT_GT(corpus.probability(batch.ids[i], batch.targets[i]), 0.0);
    }
  }

  EXPECT_GT(documents, 2 * 32) << "rows should hold several documents";
  EXPECT_EQ(batch.valid_tokens(), 32 * 64 - documents);
}

TEST(SyntheticCorpus, ValidationEndsWithAShorterBatch) {
  const SyntheticCorpus corpus({.validation_rows = 10});

  EXPECT_EQ(corpus.validation_batch(0, 4)->rows, 4);
  EXPECT_EQ(corpus.validation_batch(2, 4)->rows, 2);
  EXPECT_FALSE(corpus.validation_batch(3, 4).has_value());
  EXPECT_EQ(corpus.validation_batch(2, 4)->ids, slice_rows(*corpus.validation_batch(0, 10), 8, 2).ids);
}

TEST(SyntheticCorpus, NamesAnOptionOutOfRange) {
  EXPECT_EQ(message_of<InputError>([] { SyntheticCorpus corpus({.vocabulary = 4, .branching = 5}); }),
            "synthetic corpus: branching is 5, it must be from 1 to the vocabulary of 4");
  EXPECT_THROW(SyntheticCorpus({.vocabulary = 0}), InputError);
  EXPECT_THROW(SyntheticCorpus({.sequence = 0}), InputError);
}

TEST(SyntheticCorpus, IsIdentifiedByWhatItsBatchesDependOn) {
  const std::vector<SyntheticOptions> all = {{},
                                             {.vocabulary = 65},
                                             {.branching = 7},
                                             {.sequence = 65},
                                             {.seed = 2},
                                             {.row_shape = RowShape::packed},
                                             {.validation_rows = 255}};
  std::set<std::string> identities;
  for (const SyntheticOptions& options : all) identities.insert(SyntheticCorpus(options).identity());

  EXPECT_EQ(identities.size(), all.size());
}

}  // namespace
}  // namespace tandem
