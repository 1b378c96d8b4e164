// SPDX-License-Identifier: Apache-2.0
// Pieces, packing and buckets by themselves; that whole batches are the definition's is text_source_test.cpp's.
#include <map>
#include <numeric>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/rng.h"
#include "core/text_data.h"
#include "optimized/data_pipeline/bucketing.h"
#include "optimized/data_pipeline/packing.h"
#include "optimized/data_pipeline/piece_index.h"
#include "reference/data_pipeline.h"

namespace tandem {
namespace {

/// Documents of given lengths; token i is i mod 1000.
class MadeUpTokens final : public TokenStore {
 public:
  explicit MadeUpTokens(const std::vector<std::int64_t>& lengths) : begins_(lengths.size() + 1, 0) {
    std::partial_sum(lengths.begin(), lengths.end(), begins_.begin() + 1);
  }
  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return begins_.back(); }
  [[nodiscard]] std::int64_t num_documents() const noexcept override { return std::ssize(begins_) - 1; }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override {
    return begins_.at(static_cast<std::size_t>(index));
  }
  void read(std::int64_t first, std::span<std::int32_t> out) const override {
    for (std::int32_t& token : out) token = static_cast<std::int32_t>(first++ % 1000);
  }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return 1000; }
  [[nodiscard]] std::string describe() const override { return "made up"; }

 private:
  std::vector<std::int64_t> begins_;
};

/// Some empty, some of one token, which have no piece; some of several pieces.
std::vector<std::int64_t> random_lengths(std::uint64_t seed, int documents, std::uint64_t longest) {
  CounterRng rng(seed, "test lengths");
  std::vector<std::int64_t> lengths;
  for (int i = 0; i < documents; ++i) lengths.push_back(static_cast<std::int64_t>(rng.next_below(longest)));
  return lengths;
}

std::vector<std::pair<std::int64_t, std::int64_t>> listed(const TokenPart& part, std::int64_t sequence) {
  const TokenStore& store = part.store();
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  PartDocuments documents(part, 0, store.num_documents());
  Interval tokens;
  while (documents.next(tokens)) {
    for (std::int64_t first = tokens.begin; first + 1 < tokens.end; first += sequence) {
      pieces.emplace_back(first, std::min(sequence, tokens.end - 1 - first));
    }
  }
  return pieces;
}

TEST(PieceIndex, FindsEveryPieceOfBothPartsByItsNumber) {
  for (const double held_out : {0.0, 0.001, 0.13, 0.6}) {
    const auto store = std::make_shared<MadeUpTokens>(random_lengths(3, 500, 40));
    std::int64_t pairs = 0;
    for (const SplitPart side : {SplitPart::training, SplitPart::validation}) {
      const TokenPart part(store, held_out, side);
      const PieceIndex index(part, 8);
      const auto expected = listed(part, 8);
      ASSERT_EQ(index.num_pieces(), std::ssize(expected)) << held_out;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const Piece piece = index.piece(static_cast<std::int64_t>(i));
        EXPECT_EQ(std::pair(piece.first_token, piece.pairs), expected[i]) << i;
        pairs += piece.pairs;
      }
      EXPECT_THROW((void)index.piece(index.num_pieces()), ContractError);
      EXPECT_THROW((void)index.piece(-1), ContractError);
    }
    EXPECT_GT(pairs, 8000);
  }
}

TEST(PieceIndex, CutsTheDocumentThatIsSplitByPosition) {
  const auto store = std::make_shared<MadeUpTokens>(std::vector<std::int64_t>{10, 10});
  const TokenPart training(store, 0.3, SplitPart::training);
  const TokenPart validation(store, 0.3, SplitPart::validation);
  using Listed = std::vector<std::pair<std::int64_t, std::int64_t>>;

  EXPECT_EQ(listed(training, 100), (Listed{{0, 9}, {10, 3}}));
  EXPECT_EQ(listed(validation, 100), (Listed{{14, 5}}));
}

TEST(PieceIndex, OfNothingHasNoPiece) {
  const auto store = std::make_shared<MadeUpTokens>(std::vector<std::int64_t>{});
  const TokenPart part(store, 0, SplitPart::training);

  EXPECT_EQ(PieceIndex(part, 8).num_pieces(), 0);
  EXPECT_EQ(PackedRows(PieceIndex(part, 8), 8).num_rows(), 0);
}

TEST(Pack, PutsEachIntoTheFirstRowWithRoomLongestFirst) {
  const std::vector<std::int64_t> lengths = {3, 10, 4, 6, 3, 7};
  std::vector<std::uint16_t> row_of(lengths.size());

  // 10 | 7 3 | 6 4 | 3: of the two threes the earlier.
  EXPECT_EQ(pack(lengths, 10, row_of), 4);
  EXPECT_EQ(row_of, (std::vector<std::uint16_t>{1, 0, 2, 2, 3, 1}));
  EXPECT_THROW((void)pack(std::vector<std::int64_t>{11}, 10, std::span(row_of).first(1)), ContractError);
}

/// Kept or packed again, in order or not, rows are the same, and the reference's.
TEST(PackedRows, AreThoseOfTheReferenceWhetherKeptOrNot) {
  constexpr std::int64_t kSequence = 16;
  const std::vector<std::int64_t> lengths = random_lengths(5, 3000, 40);
  const auto store = std::make_shared<MadeUpTokens>(lengths);
  const TokenPart part(store, 0, SplitPart::training);
  const PieceIndex pieces(part, kSequence);
  ASSERT_GT(pieces.num_pieces(), 3 * kPackWindow);
  const PackedRows kept(pieces, kSequence);
  const PackedRows some_kept(pieces, kSequence, 1);
  std::vector<std::vector<std::int32_t>> documents;
  for (std::int64_t d = 0; d < store->num_documents(); ++d) {
    documents.emplace_back(static_cast<std::size_t>(lengths[static_cast<std::size_t>(d)]));
    store->read(store->document_begin(d), documents.back());
  }
  const auto expected = reference::pack_pieces(reference::cut_pieces(documents, kSequence), kSequence);

  ASSERT_EQ(kept.num_rows(), std::ssize(expected));
  ASSERT_EQ(some_kept.num_rows(), std::ssize(expected));
  PackedRows::Window window, scratch;
  std::vector<Piece> found, again;
  for (std::int64_t i = 0; i < kept.num_rows(); ++i) {
    const std::int64_t row = (i * 7) % kept.num_rows();
    kept.pieces_of(row, window, found);
    some_kept.pieces_of(row, scratch, again);
    ASSERT_EQ(found.size(), expected[static_cast<std::size_t>(row)].size()) << row;
    ASSERT_EQ(again.size(), found.size()) << row;
    for (std::size_t k = 0; k < found.size(); ++k) {
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(found[k].pairs) + 1);
      store->read(found[k].first_token, tokens);
      EXPECT_EQ(tokens, expected[static_cast<std::size_t>(row)][k]) << row;
      EXPECT_EQ(again[k].first_token, found[k].first_token) << row;
    }
  }
}

/// Enough documents that several threads share them, where there are several cores.
TEST(PackedRows, AreCountedInSeveralThreadsAsInOne) {
  constexpr std::int64_t kSequence = 12;
  const auto store = std::make_shared<MadeUpTokens>(random_lengths(6, 560000, 5));
  const TokenPart part(store, 0.05, SplitPart::training);
  const auto expected = listed(part, kSequence);
  const PieceIndex pieces(part, kSequence);
  ASSERT_EQ(pieces.num_pieces(), std::ssize(expected));
  for (std::int64_t i = 0; i < pieces.num_pieces(); i += 997) {
    EXPECT_EQ(pieces.piece(i).first_token, expected[static_cast<std::size_t>(i)].first) << i;
  }

  const PackedRows packed(pieces, kSequence);
  std::int64_t rows = 0;
  for (std::size_t first = 0; first < expected.size(); first += kPackWindow) {
    std::vector<std::int64_t> lengths;
    for (std::size_t i = first; i < std::min<std::size_t>(first + kPackWindow, expected.size()); ++i) {
      lengths.push_back(expected[i].second);
    }
    std::vector<std::uint16_t> row_of(lengths.size());
    rows += pack(lengths, kSequence, row_of);
  }
  EXPECT_EQ(packed.num_rows(), rows);
}

/// Every place of a window is in exactly one row, in batches of neighbouring lengths.
TEST(Buckets, DealEachPlaceOnceAndGroupByLength) {
  constexpr std::int64_t kBatches = 5, kRows = 3;
  const Buckets buckets(kBatches, 4, {});
  const auto piece_at = [](std::int64_t place) { return Piece{place, 1 + place * 37 % 11}; };
  for (std::int64_t window = 0; window < 4; ++window) {
    std::map<std::int64_t, int> places;
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    for (std::int64_t step = window * kBatches; step < (window + 1) * kBatches; ++step) {
      const std::vector<Piece> batch = buckets.batch(step, kRows, piece_at);
      ASSERT_EQ(std::ssize(batch), kRows);
      for (const Piece& piece : batch) ++places[piece.first_token];
      ranges.emplace_back(batch.front().pairs, batch.back().pairs);
    }
    EXPECT_EQ(std::ssize(places), kBatches * kRows);
    EXPECT_EQ(places.begin()->first, window * kBatches * kRows);
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i)
      EXPECT_LE(ranges[i - 1].second, ranges[i].first) << "batches overlap in length";
  }
}

/// Windows are kept by number and rows: whoever asks again, in any order or for other rows, gets what a source of its own would
/// give.
TEST(Buckets, NeverTakeAWindowForAnother) {
  constexpr std::int64_t kBatches = 4;
  const auto piece_at = [](std::int64_t place) { return Piece{place, 1 + place * 37 % 11}; };
  const Buckets buckets(kBatches, 1, {});
  CounterRng rng(2, "test order");
  for (int i = 0; i < 500; ++i) {
    // Near each other, so that some are found, and far apart, by powers of two too.
    const auto near = static_cast<std::int64_t>(rng.next_below(3 * kBatches));
    const std::int64_t step = near + (kBatches << rng.next_below(12)) * static_cast<std::int64_t>(rng.next_below(2));
    const auto rows = static_cast<std::int64_t>(2 + rng.next_below(2));
    const std::vector<Piece> found = buckets.batch(step, rows, piece_at);
    const std::vector<Piece> expected = Buckets(kBatches, 1, {}).batch(step, rows, piece_at);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t row = 0; row < expected.size(); ++row) {
      ASSERT_EQ(found[row].first_token, expected[row].first_token) << "step " << step << " of " << rows << " rows";
    }
  }
}

TEST(Buckets, AreTheSameForThreadsThatAskAtOnce) {
  const Buckets buckets(4, 1, {}), alone(4, 1, {});
  const auto piece_at = [](std::int64_t place) { return Piece{place, 1 + place * 37 % 11}; };
  std::vector<std::vector<Piece>> found(64);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t step = t; step < found.size(); step += 4)
          found[step] = buckets.batch(static_cast<std::int64_t>(step), 5, piece_at);
      });
    }
  }
  for (std::size_t step = 0; step < found.size(); ++step) {
    const std::vector<Piece> expected = alone.batch(static_cast<std::int64_t>(step), 5, piece_at);
    for (std::size_t row = 0; row < expected.size(); ++row) EXPECT_EQ(found[step][row].first_token, expected[row].first_token);
  }
}

}  // namespace
}  // namespace tandem
