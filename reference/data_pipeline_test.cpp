// SPDX-License-Identifier: Apache-2.0
#include "reference/data_pipeline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/test_folder.h"

namespace tandem::reference {
namespace {

using Strings = std::vector<std::string>;

std::string text_of(const std::vector<std::int32_t>& tokens) {
  std::string text;
  for (const std::int32_t token : tokens) {
    text += token == kEndOfDocument ? '|' : token == kIgnoredTarget ? '_' : static_cast<char>(token);
  }
  return text;
}

TEST(SplitDocuments, ByFileKeepsEverything) { EXPECT_EQ(split_documents("a\n\nb\n", DocumentRule::file), (Strings{"a\n\nb\n"})); }

TEST(SplitDocuments, ByParagraphSplitsAtEmptyLines) {
  EXPECT_EQ(split_documents("\n\na\nb\n\n\r\nc\n", DocumentRule::paragraph), (Strings{"a\nb\n", "c\n"}));
  EXPECT_EQ(split_documents("a", DocumentRule::paragraph), (Strings{"a"}));
  EXPECT_EQ(split_documents("\n\r\n\n", DocumentRule::paragraph), (Strings{}));
}

TEST(SplitDocuments, ByLineLeavesOutEmptyLines) {
  EXPECT_EQ(split_documents("a\n\nbc\r\n\r\nd", DocumentRule::line), (Strings{"a", "bc\r", "d"}));
}

TEST(EpochPermutation, HoldsEverySampleOnce) {
  for (const std::int64_t samples : {1, 2, 3, 17, 255, 256, 257, 1000, 5000}) {
    std::vector<std::int64_t> order = epoch_permutation(samples, 3, 1);
    std::sort(order.begin(), order.end());
    std::vector<std::int64_t> all(static_cast<std::size_t>(samples));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(order, all) << samples;
  }
}

TEST(EpochPermutation, DiffersByEpochAndSeed) {
  EXPECT_NE(epoch_permutation(100, 1, 0), epoch_permutation(100, 1, 1));
  EXPECT_NE(epoch_permutation(100, 1, 0), epoch_permutation(100, 2, 0));
}

/// Over many epochs each sample is at each place about equally often: the count is binomial with mean n / samples.
TEST(EpochPermutation, PutsEachSampleAtEachPlaceEquallyOften) {
  constexpr int kSamples = 6;
  constexpr int kEpochs = 6000;
  std::map<std::pair<int, std::int64_t>, int> count;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto order = epoch_permutation(kSamples, 11, epoch);
    for (int place = 0; place < kSamples; ++place) ++count[{place, order[static_cast<std::size_t>(place)]}];
  }

  const double mean = double{kEpochs} / kSamples;
  const double deviation = std::sqrt(mean * (1 - 1.0 / kSamples));
  for (int place = 0; place < kSamples; ++place) {
    for (std::int64_t sample = 0; sample < kSamples; ++sample) {
      EXPECT_NEAR((count[{place, sample}]), mean, 5 * deviation) << "sample " << sample << " at place " << place;
    }
  }
}

TEST(ReferenceTextSource, CutsTheStreamIntoShiftedSamples) {
  const TestFolder folder;
  const TextSource source({folder.write("a", "abcdef"), folder.write("b", "gh")}, {.sequence = 4, .validation_fraction = 0});

  std::set<std::string> rows;
  const Batch batch = source.training_batch(0, 2);
  for (std::int64_t row = 0; row < 2; ++row) {
    const Batch one = slice_rows(batch, row, 1);
    rows.insert(text_of(one.ids) + " " + text_of(one.targets));
  }

  EXPECT_EQ(source.training_tokens(), 10) << "abcdef|gh|";
  EXPECT_EQ(source.epoch_rows(), 2);
  EXPECT_EQ(rows, (std::set<std::string>{"abcd bcde", "ef|g f|gh"}));
}

TEST(ReferenceTextSource, RestartsAtDocumentsWhenAskedTo) {
  const TestFolder folder;
  const TextSource source({folder.write("a", "ab\ncd\nefgh")},
                          {.sequence = 9, .validation_fraction = 0, .respect_documents = true, .documents = DocumentRule::line});

  const Batch batch = source.training_batch(0, 1);

  EXPECT_EQ(text_of(batch.ids), "ab|cd|efg");
  EXPECT_EQ(text_of(batch.targets), "b|_d|_fgh");
  EXPECT_EQ(batch.positions, (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(batch.document_starts, (std::vector<std::int32_t>{0, 0, 0, 3, 3, 3, 6, 6, 6}));
}

TEST(CutPieces, EveryPairIsInOnePiece) {
  using Pieces = std::vector<PieceTokens>;
  EXPECT_EQ(cut_pieces({{1, 2, 3, 4, 5, 0}, {0}, {}, {7, 0}}, 2), (Pieces{{1, 2, 3}, {3, 4, 5}, {5, 0}, {7, 0}}));
  EXPECT_EQ(cut_pieces({{1, 2, 0}}, 2), (Pieces{{1, 2, 0}}));
}

TEST(PackPieces, LongestFirstIntoTheFirstRowWithRoom) {
  using Rows = std::vector<std::vector<PieceTokens>>;
  // Pairs 1, 4, 2, 3, 1 in rows of 4: 4 | 3 and the first 1 | 2 and the last.
  const std::vector<PieceTokens> pieces = {{1, 0}, {2, 2, 2, 2, 0}, {3, 3, 0}, {4, 4, 4, 0}, {5, 0}};
  EXPECT_EQ(pack_pieces(pieces, 4), (Rows{{pieces[1]}, {pieces[0], pieces[3]}, {pieces[2], pieces[4]}}));
  EXPECT_EQ(pack_pieces(std::vector<PieceTokens>(2 * kPackWindow + 1, {1, 0}), 1 << 20).size(), 3U) << "a window at a time";
}

std::map<std::string, std::string> rows_of(const Batch& batch) {
  std::map<std::string, std::string> rows;
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    const Batch one = slice_rows(batch, row, 1);
    std::string places;
    for (std::size_t t = 0; t < one.ids.size(); ++t) places += fmt::format("{}.{} ", one.document_starts[t], one.positions[t]);
    rows[text_of(one.ids) + " " + text_of(one.targets)] = places;
  }
  return rows;
}

TEST(ReferenceTextSource, PadsToTheLongestOfABatch) {
  const TestFolder folder;
  const TextSource source(
      {folder.write("a", "abcdef\nx\ngh")},
      {.sequence = 4, .validation_fraction = 0, .documents = DocumentRule::line, .batching = Batching::padded});

  EXPECT_EQ(source.epoch_rows(), 4);
  EXPECT_EQ(rows_of(source.training_batch(0, 4)), (std::map<std::string, std::string>{{"abcd bcde", "0.0 0.1 0.2 0.3 "},
                                                                                      {"ef|| f|__", "0.0 0.1 2.0 2.1 "},
                                                                                      {"x||| |___", "0.0 1.0 1.1 1.2 "},
                                                                                      {"gh|| h|__", "0.0 0.1 2.0 2.1 "}}));
  for (std::int64_t step = 0; step < 4; ++step) {
    const Batch batch = source.training_batch(step, 1);
    EXPECT_EQ(batch.valid_tokens(), batch.sequence) << "the longest is the only one";
  }
}

TEST(ReferenceTextSource, PacksDocumentsWithTheirOwnPositions) {
  const TestFolder folder;
  const TextSource source(
      {folder.write("a", "abcdef\nx\ngh")},
      {.sequence = 4, .validation_fraction = 0, .documents = DocumentRule::line, .batching = Batching::packed});

  EXPECT_EQ(rows_of(source.training_batch(0, 3)),
            (std::map<std::string, std::string>{
                {"abcd bcde", "0.0 0.1 0.2 0.3 "}, {"efgh f|h|", "0.0 0.1 2.0 2.1 "}, {"x||| |___", "0.0 1.0 1.1 1.2 "}}));
}

TEST(ReferenceTextSource, HoldsOutTheLastTokensOfOneDocument) {
  const TestFolder folder;
  const TextSource source({folder.write("a", "abcdefghijklmnopqrs")}, {.sequence = 2, .validation_fraction = 0.25});

  EXPECT_EQ(source.training_tokens(), 15);
  EXPECT_EQ(text_of(source.validation_batch(0, 9)->ids), "pqrs");
  EXPECT_EQ(text_of(source.validation_batch(0, 9)->targets), "qrs|");
  EXPECT_EQ(text_of(source.validation_batch(1, 1)->ids), "rs");
  EXPECT_FALSE(source.validation_batch(2, 1).has_value());
}

TEST(ReferenceTextSource, HoldsOutWholeDocumentsSpreadEvenly) {
  const TestFolder folder;
  const TextSource source({folder.write("a", "a\nb\nc\nd\ne\nf")},
                          {.sequence = 1, .validation_fraction = 0.34, .documents = DocumentRule::line});

  EXPECT_EQ(source.training_tokens(), 8);
  EXPECT_EQ(text_of(source.validation_batch(0, 9)->ids), "c|f") << "documents 2 and 5 of 6";
}

TEST(ReferenceTextSource, NamesFilesThatCannotBeTrainedOn) {
  const TestFolder folder;
  const auto message = [&](const std::filesystem::path& file, const TextDataOptions& options = {}) {
    return message_of<InputError>([&] { TextSource source({file}, options); });
  };

  EXPECT_EQ(message("/nonexistent"), "cannot read /nonexistent: No such file or directory");
  EXPECT_NE(message(folder.path()).find("it is a directory"), std::string::npos);
  EXPECT_EQ(message(folder.write("empty", "")), (folder / "empty").string() + " is empty");
  EXPECT_NE(message(folder.write("binary", "abc\xFF")).find("not UTF-8: byte 0xff at offset 3"), std::string::npos);
  EXPECT_NE(message(folder.write("lines", "\n\n"), {.documents = DocumentRule::line}).find("has no document"), std::string::npos);
  EXPECT_EQ(message(folder.write("short", "hello world")),
            (folder / "short").string() + " has 12 tokens, 11 of them for training; a sample needs 65 (sequence + 1)");
}

}  // namespace
}  // namespace tandem::reference
