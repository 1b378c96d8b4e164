// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/text_source.h"

#include <map>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/rng.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/prepare.h"
#include "reference/data_pipeline.h"

namespace tandem {
namespace {

using Paths = std::vector<std::filesystem::path>;

/// Words, empty lines, carriage returns and characters of several bytes in an order that the seed decides.
std::string made_up_text(std::uint64_t seed, int pieces) {
  static const std::vector<std::string> kPieces = {
      "to be ", "or\n", "\n", "\n\n", "über", "\r\n", "東京 ", "x", "a longer run of words. "};
  CounterRng rng(seed, "test text");
  std::string text = "start";
  for (int i = 0; i < pieces; ++i) text += kPieces[rng.next_below(kPieces.size())];
  return text;
}

void expect_equal(const Batch& actual, const Batch& expected, const std::string& where) {
  EXPECT_EQ(actual.rows, expected.rows) << where;
  EXPECT_EQ(actual.sequence, expected.sequence) << where;
  EXPECT_EQ(actual.ids, expected.ids) << where;
  EXPECT_EQ(actual.targets, expected.targets) << where;
  EXPECT_EQ(actual.positions, expected.positions) << where;
  EXPECT_EQ(actual.document_starts, expected.document_starts) << where;
  EXPECT_EQ(actual.row_ids, expected.row_ids) << where;
}

/// Two epochs and a bit of training, in about a hundred batches, and all of validation.
void expect_same_batches(const std::vector<const BatchSource*>& all, const BatchSource& expected, const std::string& where) {
  const std::int64_t epoch_rows = *expected.epoch_rows();
  for (const BatchSource* actual : all) {
    ASSERT_EQ(actual->epoch_rows(), epoch_rows) << where;
    ASSERT_EQ(actual->training_tokens(), expected.training_tokens()) << where;
  }
  const std::int64_t rows = 7 + epoch_rows / 50;
  for (std::int64_t step = 0; step < 2 * epoch_rows / rows + 2; ++step) {
    const Batch batch = expected.training_batch(step, rows);
    for (const BatchSource* actual : all) {
      expect_equal(actual->training_batch(step, rows), batch, fmt::format("{}, step {}", where, step));
    }
  }
  for (std::int64_t index = 0;; ++index) {
    const auto batch = expected.validation_batch(index, 3);
    for (const BatchSource* actual : all) {
      const auto same = actual->validation_batch(index, 3);
      ASSERT_EQ(same.has_value(), batch.has_value()) << where;
      if (batch) expect_equal(*same, *batch, fmt::format("{}, validation {}", where, index));
    }
    if (!batch) break;
  }
}

struct Variant {
  DocumentRule documents;
  bool respect_documents;
  double validation_fraction;
  std::uint64_t seed;
  Batching batching = Batching::stream;
  std::int64_t bucket_batches = 16;
  std::int64_t multiple = 1;
};

class TextSourceVariants : public testing::TestWithParam<Variant> {};

TEST_P(TextSourceVariants, EqualsTheReferenceBitForBit) {
  const Variant variant = GetParam();
  const TestFolder folder;
  const Paths files = {folder.write("a", made_up_text(variant.seed, 300)), folder.write("b", made_up_text(variant.seed + 1, 10)),
                       folder.write("c", made_up_text(variant.seed + 2, 150))};
  for (const std::int64_t sequence : {1, 13, 64}) {
    const TextDataOptions options = {.sequence = sequence,
                                     .validation_fraction = variant.validation_fraction,
                                     .seed = variant.seed,
                                     .respect_documents = variant.respect_documents,
                                     .documents = variant.documents,
                                     .batching = variant.batching,
                                     .bucket_batches = variant.bucket_batches,
                                     .pad_multiple = sequence == 64 ? variant.multiple : 1};
    const reference::TextSource expected(files, options);
    const auto from_text = open_text(files, options);
    prepare_data(files, "bytes", folder / "prepared", variant.documents);
    const auto from_prepared = open_text({folder / "prepared"}, options);

    expect_same_batches({from_text.get(), from_prepared.get()}, expected, fmt::format("sequence {}", sequence));
    EXPECT_EQ(from_text->identity(), from_prepared->identity()) << "the same tokens, wherever they are kept";
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, TextSourceVariants,
                         testing::Values(Variant{DocumentRule::file, false, 0.1, 1}, Variant{DocumentRule::file, true, 0.4, 2},
                                         Variant{DocumentRule::paragraph, true, 0.1, 3},
                                         Variant{DocumentRule::paragraph, false, 0.3, 4},
                                         Variant{DocumentRule::line, true, 0.25, 5}, Variant{DocumentRule::line, true, 0.0, 6},
                                         Variant{DocumentRule::line, false, 0.9, 1234567890123456789U},
                                         Variant{DocumentRule::line, false, 0.2, 11, Batching::padded},
                                         Variant{DocumentRule::file, false, 0.1, 12, Batching::padded, 1, 16},
                                         Variant{DocumentRule::line, false, 0.2, 13, Batching::bucketed, 3, 8},
                                         Variant{DocumentRule::paragraph, false, 0.0, 14, Batching::bucketed, 50},
                                         Variant{DocumentRule::line, false, 0.2, 15, Batching::packed},
                                         Variant{DocumentRule::file, false, 0.3, 16, Batching::packed}),
                         [](const testing::TestParamInfo<Variant>& variant) {
                           return fmt::format("{}{}{}Seed{}", name(variant.param.batching), name(variant.param.documents),
                                              variant.param.respect_documents ? "Respected" : "", variant.param.seed);
                         });

/// `ranks` parts of every global batch, dealt as the engine deals them.
TEST(TextSource, RanksTogetherSeeTheGlobalBatchWhateverTheirNumber) {
  const TestFolder folder;
  const Paths files = {folder.write("a", made_up_text(8, 400))};
  for (const Batching batching : {Batching::stream, Batching::padded, Batching::bucketed, Batching::packed}) {
    const TextDataOptions options = {
        .sequence = 16, .respect_documents = true, .documents = DocumentRule::line, .batching = batching, .bucket_batches = 5};
    const auto source = open_text(files, options);
    const reference::TextSource expected(files, options);
    constexpr std::int64_t kRows = 10;
    for (std::int64_t step = 0; step < 12; ++step) {
      const Batch global = expected.training_batch(step, kRows);
      for (const int ranks : {1, 2, 3, 4, 7, 12}) {
        for (int rank = 0; rank < ranks; ++rank) {
          const Interval rows = balanced_part(kRows, ranks, rank);
          expect_equal(source->training_rows(step, kRows, rows), slice_rows(global, rows.begin, rows.size()),
                       fmt::format("{}, step {}, rank {} of {}", name(batching), step, rank, ranks));
        }
      }
    }
  }
}

/// Rows of `count` global numbers from `first` on, as text, counted. Distinct samples of this file have distinct text.
std::map<std::vector<std::int32_t>, int> ledger(const BatchSource& source, std::int64_t first, std::int64_t count) {
  std::map<std::vector<std::int32_t>, int> seen;
  for (std::int64_t number = first; number < first + count; ++number) ++seen[source.training_batch(number, 1).ids];
  return seen;
}

std::string numbered_text(int lines) {
  std::string text;
  for (int i = 0; i < lines; ++i) text += fmt::format("{:07}\n", i);
  return text;
}

TEST(TextSource, ShowsEverySampleExactlyOnceInEachEpoch) {
  const TestFolder folder;
  const auto source = open_text({folder.write("a", numbered_text(301))}, {.sequence = 8, .validation_fraction = 0.1});
  const std::int64_t samples = *source->epoch_rows();
  ASSERT_EQ(samples, 271);

  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const auto seen = ledger(*source, epoch * samples, samples);
    EXPECT_EQ(static_cast<std::int64_t>(seen.size()), samples) << "epoch " << epoch;
    for (const auto& [row, times] : seen) EXPECT_EQ(times, 1);
  }
}

TEST(TextSource, ContinuesIntoTheNextEpochInsideABatch) {
  const TestFolder folder;
  const auto source = open_text({folder.write("a", numbered_text(12))}, {.sequence = 8, .validation_fraction = 0});
  ASSERT_EQ(source->epoch_rows(), 12);

  const Batch batch = source->training_batch(1, 8);

  for (std::int64_t row = 0; row < 8; ++row) {
    EXPECT_EQ(slice_rows(batch, row, 1).ids, source->training_batch(8 + row, 1).ids) << "global row " << 8 + row;
  }
}

TEST(TextSource, ShufflesEachEpochAnew) {
  const TestFolder folder;
  const auto source = open_text({folder.write("a", numbered_text(100))}, {.sequence = 8, .validation_fraction = 0});
  const std::int64_t samples = *source->epoch_rows();

  EXPECT_NE(source->training_batch(0, samples).ids, source->training_batch(1, samples).ids);
}

TEST(TextSource, ServesBatchesWithMoreRowsThanSamples) {
  const TestFolder folder;
  const auto source = open_text({folder.write("a", "abcdefghij")}, {.sequence = 4, .validation_fraction = 0});
  ASSERT_EQ(source->epoch_rows(), 2);

  const Batch batch = source->training_batch(0, 9);

  EXPECT_EQ(batch.rows, 9);
  EXPECT_EQ(batch.valid_tokens(), 36);
}

/// The tokens of both parts add up to the text, and no row of one part is a row of the other.
TEST(TextSource, KeepsTrainingAndValidationApart) {
  const TestFolder folder;
  const Paths files = {folder.write("a", numbered_text(200))};
  for (const DocumentRule rule : {DocumentRule::file, DocumentRule::line}) {
    const auto source = open_text(files, {.sequence = 8, .validation_fraction = 0.2, .documents = rule});
    const auto training = ledger(*source, 0, *source->epoch_rows());
    std::int64_t held_out = 0;
    while (const auto batch = source->validation_batch(held_out, 1)) {
      EXPECT_FALSE(training.contains(batch->ids)) << decode_bytes(batch->ids);
      ++held_out;
    }

    EXPECT_NEAR(static_cast<double>(held_out), 40, 1) << "a fifth of 200 samples";
    EXPECT_NEAR(static_cast<double>(*source->epoch_rows()), 160, 1);
  }
}

TEST(TextSource, IsReadByManyThreadsAtOnce) {
  const TestFolder folder;
  prepare_data({folder.write("a", made_up_text(3, 500))}, "bytes", folder / "p", DocumentRule::line);
  const auto source = open_text({folder / "p"}, {.sequence = 16});
  const Batch expected = source->training_batch(2, 8);
  std::vector<Batch> parts(8);

  {
    std::vector<std::jthread> threads;
    for (std::int64_t row = 0; row < 8; ++row) {
      threads.emplace_back([&, row] { parts[static_cast<std::size_t>(row)] = source->training_rows(2, 8, {row, row + 1}); });
    }
  }

  for (std::int64_t row = 0; row < 8; ++row) {
    expect_equal(parts[static_cast<std::size_t>(row)], slice_rows(expected, row, 1), fmt::format("row {}", row));
  }
}

TEST(TextSource, NamesFileAndNumbersWhenTheTextIsTooShort) {
  const TestFolder folder;
  const std::string message = message_of<InputError>([&] { (void)open_text({folder.write("short", "hello world")}, {}); });

  EXPECT_EQ(message, (folder / "short").string() +
                         " (tokenizer bytes) has 12 tokens, 11 of them for training; a sample needs 65 (sequence + 1)");
}

TEST(TextSource, SaysWhyThereIsNoValidation) {
  const TestFolder folder;
  const auto source = open_text({folder.write("a", std::string(200, 'x'))}, {});

  EXPECT_FALSE(source->validation_batch(0, 4).has_value());
  EXPECT_NE(source->describe().find("validation none (20 tokens held out, a sample needs 65)"), std::string::npos)
      << source->describe();
}

/// What makes another batch makes another identity; what does not, does not.
TEST(TextSource, IsIdentifiedByWhatItsBatchesDependOn) {
  const TestFolder folder;
  const Paths files = {folder.write("a", numbered_text(50))};
  const auto identity = [&](const TextDataOptions& options) { return open_text(files, options)->identity(); };
  const std::vector<TextDataOptions> all = {{.sequence = 8},
                                            {.sequence = 9},
                                            {.sequence = 8, .validation_fraction = 0.2},
                                            {.sequence = 8, .seed = 2},
                                            {.sequence = 8, .respect_documents = true},
                                            {.sequence = 8, .documents = DocumentRule::line},
                                            {.sequence = 8, .batching = Batching::padded},
                                            {.sequence = 8, .batching = Batching::padded, .pad_multiple = 4},
                                            {.sequence = 8, .batching = Batching::packed},
                                            {.sequence = 8, .batching = Batching::bucketed},
                                            {.sequence = 8, .batching = Batching::bucketed, .bucket_batches = 3}};

  std::set<std::string> identities;
  for (const TextDataOptions& options : all) identities.insert(identity(options));

  EXPECT_EQ(identities.size(), all.size());
  EXPECT_EQ(identity({.sequence = 8, .bucket_batches = 3, .pad_multiple = 4}), identity(all.front()))
      << "of no matter to a stream";
  EXPECT_EQ(identity(all.front()).find(folder.path().string()), std::string::npos) << "no paths";
}

TEST(TextSource, NamesWhatIsMissingForARowOfDocuments) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "p", DType::u16);
  for (int i = 0; i < 3; ++i) {
    writer.add_sequence(std::vector<std::int32_t>{7});
    writer.end_document();
  }
  writer.commit();

  const std::string message = message_of<InputError>(
      [&] { (void)open_text({folder / "p"}, {.sequence = 8, .validation_fraction = 0, .batching = Batching::packed}); });

  EXPECT_NE(message.find("has 3 tokens, 3 of them for training; a sample needs a document of at least 2"), std::string::npos)
      << message;
}

TEST(TextSource, RefusesPathsThatAreNotThere) {
  EXPECT_EQ(message_of<InputError>([] { (void)open_text({"/nonexistent"}, {}); }),
            "cannot read /nonexistent: No such file or directory");
  EXPECT_EQ(message_of<InputError>([] { (void)open_text({}, {}); }), "no text file is named");
}

TEST(TextSource, OpensPreparedDataByAnyOfItsNames) {
  const TestFolder folder;
  prepare_data({folder.write("a", numbered_text(50))}, "bytes", folder / "p");

  for (const auto* name : {"p", "p.bin", "p.idx"})
    EXPECT_EQ(open_text({folder / name}, {.sequence = 8})->vocabulary(), 256) << name;
}

TEST(TextSource, ReadsDataOfAnotherProgramWithoutDescription) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "p", DType::i32);
  writer.add_sequence(std::vector<std::int32_t>{5, 70000, 3, 2, 1});
  writer.end_document();
  writer.add_sequence(std::vector<std::int32_t>{9, 8, 7});
  writer.end_document();
  writer.commit();

  const auto source = open_text({folder / "p"}, {.sequence = 7, .validation_fraction = 0, .respect_documents = true});
  const Batch batch = source->training_batch(0, 1);

  EXPECT_EQ(source->vocabulary(), 70001);
  EXPECT_EQ(batch.ids, (std::vector<std::int32_t>{5, 70000, 3, 2, 1, 9, 8}));
  EXPECT_EQ(batch.targets, (std::vector<std::int32_t>{70000, 3, 2, 1, kIgnoredTarget, 8, 7}));
  EXPECT_EQ(batch.positions, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 0, 1}));
}

}  // namespace
}  // namespace tandem
