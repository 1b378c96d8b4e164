// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/token_part.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/data_pipeline/text_source.h"

namespace tandem {
namespace {

/// A store of any size that exists as a formula only: all documents have the same length, and token i is i mod 251.
class VirtualTokens final : public TokenStore {
 public:
  VirtualTokens(std::int64_t documents, std::int64_t document_tokens)
      : documents_(documents), document_tokens_(document_tokens) {}
  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return documents_ * document_tokens_; }
  [[nodiscard]] std::int64_t num_documents() const noexcept override { return documents_; }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override { return index * document_tokens_; }
  void read(std::int64_t first, std::span<std::int32_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::int32_t>((first + static_cast<std::int64_t>(i)) % 251);
  }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return 251; }
  [[nodiscard]] std::string describe() const override { return "virtual"; }

 private:
  std::int64_t documents_;
  std::int64_t document_tokens_;
};

struct Read {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> begins;
};

Read read(const TokenPart& part, std::int64_t first, std::size_t count) {
  Read result{std::vector<std::int32_t>(count, -1), std::vector<std::uint8_t>(count, 2)};  // of an earlier reading
  part.read(first, result.tokens, result.begins);
  return result;
}

TEST(DocumentSplit, HoldsOutEvenlySpreadDocuments) {
  for (const std::int64_t documents : {1, 2, 9, 10, 97, 1000}) {
    for (const double fraction : {0.0, 0.05, 0.1, 0.5, 0.99}) {
      const DocumentSplit split(documents, fraction);
      std::vector<std::int64_t> held_out;
      for (std::int64_t d = 0; d < documents; ++d) {
        EXPECT_EQ(split.held_out_before(d), static_cast<std::int64_t>(held_out.size()));
        if (split.is_held_out(d)) held_out.push_back(d);
      }
      ASSERT_EQ(static_cast<std::int64_t>(held_out.size()), split.held_out());
      for (std::size_t j = 0; j < held_out.size(); ++j) {
        EXPECT_EQ(split.held_out_document(static_cast<std::int64_t>(j)), held_out[j]);
      }
      for (std::size_t j = 1; j < held_out.size(); ++j) {
        const std::int64_t gap = held_out[j] - held_out[j - 1];
        EXPECT_GE(gap, documents / split.held_out());
        EXPECT_LE(gap, documents / split.held_out() + 1);
      }
    }
  }
}

TEST(DocumentSplit, CountsBeyond32BitsDoNotWrap) {
  const std::int64_t documents = (std::int64_t{1} << 40) + 3;
  const DocumentSplit split(documents, 0.5);

  EXPECT_EQ(split.held_out(), documents / 2);
  EXPECT_EQ(split.held_out_before(documents), documents / 2);
  EXPECT_EQ(split.held_out_before(documents - 1), documents / 2 - 1);
  EXPECT_EQ(split.held_out_document(documents / 2 - 1), documents - 1);
  EXPECT_EQ(scaled_down(std::int64_t{1} << 62, std::int64_t{3} << 60, std::int64_t{1} << 62), std::int64_t{3} << 60);
}

TEST(TokenPart, ReadsTokensBeyondTheRangeOf32Bits) {
  const auto store = std::make_shared<VirtualTokens>(4, std::int64_t{1} << 40);
  const TokenPart training(store, 0.25, SplitPart::training);
  const TokenPart validation(store, 0.25, SplitPart::validation);

  EXPECT_EQ(training.num_tokens(), std::int64_t{3} << 40);
  EXPECT_EQ(validation.num_tokens(), std::int64_t{1} << 40);
  const std::int64_t border = std::int64_t{2} << 40;
  const Read across = read(training, border - 2, 4);
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(across.tokens[static_cast<std::size_t>(i)], (border - 2 + i) % 251);
  EXPECT_EQ(across.begins, (std::vector<std::uint8_t>{0, 0, 1, 0}));
  EXPECT_EQ(read(validation, 5, 1).tokens[0], ((std::int64_t{3} << 40) + 5) % 251) << "the last of 4 documents is held out";
}

TEST(TokenPart, SkipsHeldOutDocumentsInTheMiddle) {
  const auto store = std::make_shared<VirtualTokens>(6, 3);
  const TokenPart training(store, 0.34, SplitPart::training);
  const TokenPart validation(store, 0.34, SplitPart::validation);

  const Read all = read(training, 0, 12);
  const Read held_out = read(validation, 1, 5);

  EXPECT_EQ(all.tokens, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14}));
  EXPECT_EQ(all.begins, (std::vector<std::uint8_t>{1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0}));
  EXPECT_EQ(held_out.tokens, (std::vector<std::int32_t>{7, 8, 15, 16, 17}));
  EXPECT_EQ(held_out.begins, (std::vector<std::uint8_t>{0, 0, 1, 0, 0}));
}

TEST(TokenPart, SplitsFewDocumentsByPosition) {
  const auto store = std::make_shared<VirtualTokens>(2, 10);
  const TokenPart training(store, 0.3, SplitPart::training);
  const TokenPart validation(store, 0.3, SplitPart::validation);

  EXPECT_EQ(training.num_tokens(), 14);
  EXPECT_EQ(read(training, 8, 6).tokens, (std::vector<std::int32_t>{8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(read(training, 8, 6).begins, (std::vector<std::uint8_t>{0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(read(validation, 0, 6).tokens, (std::vector<std::int32_t>{14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(read(validation, 0, 6).begins, std::vector<std::uint8_t>(6, 0));
}

TEST(TextSource, HoldsOutRowsBeyondTheRangeOf32Bits) {
  constexpr std::int64_t kDocument = std::int64_t{1} << 40, kRows = 2, kSequence = 8;
  const auto store = std::make_shared<VirtualTokens>(4, kDocument);
  for (const Batching batching : {Batching::stream, Batching::padded}) {
    const TextSource source(store, {.sequence = kSequence, .validation_fraction = 0.25, .batching = batching});
    for (const std::int64_t index : {std::int64_t{3}, std::int64_t{1} << 33, kDocument / kSequence / kRows - 2}) {
      const std::optional<Batch> batch = source.validation_batch(index, kRows);
      ASSERT_TRUE(batch);
      const std::int64_t first = 3 * kDocument + index * kRows * kSequence;  // the last of 4 documents is held out
      for (std::int64_t i = 0; i < kRows * kSequence; ++i) {
        EXPECT_EQ(batch->ids[static_cast<std::size_t>(i)], (first + i) % 251) << name(batching) << ", batch " << index;
      }
    }
  }
}

TEST(TokenPart, RefusesTokensBeyondItsEnd) {
  const TokenPart part(std::make_shared<VirtualTokens>(2, 10), 0.3, SplitPart::training);

  EXPECT_THROW((void)read(part, 10, 5), ContractError);
  EXPECT_THROW((void)read(part, -1, 2), ContractError);
}

}  // namespace
}  // namespace tandem
