// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "optimized/data_pipeline/token_store.h"

namespace tandem {

/// floor(value * factor / divisor) for 0 <= factor <= divisor, right for all 63-bit values.
[[nodiscard]] std::int64_t scaled_down(std::int64_t value, std::int64_t factor, std::int64_t divisor) noexcept;

/// Which documents are held out of D = `documents` by core/text_data.h: `held_out` of them, evenly spread.
class DocumentSplit {
 public:
  DocumentSplit(std::int64_t documents, double validation_fraction);

  [[nodiscard]] std::int64_t documents() const noexcept { return documents_; }
  [[nodiscard]] std::int64_t held_out() const noexcept { return held_out_; }
  /// Held-out documents with an index below `document`.
  [[nodiscard]] std::int64_t held_out_before(std::int64_t document) const noexcept {
    return scaled_down(document, held_out_, documents_);
  }
  [[nodiscard]] bool is_held_out(std::int64_t document) const noexcept {
    return held_out_before(document + 1) > held_out_before(document);
  }
  /// The held-out document number `number`, counted from 0.
  [[nodiscard]] std::int64_t held_out_document(std::int64_t number) const noexcept;

 private:
  std::int64_t documents_;
  std::int64_t held_out_;
};

enum class SplitPart : std::uint8_t { training, validation };

/// The tokens of one part of the split as one row. Memory: 8 bytes a held-out document.
class TokenPart {
 public:
  /// Shares `store`.
  TokenPart(std::shared_ptr<const TokenStore> store, double validation_fraction, SplitPart part);

  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }
  [[nodiscard]] const TokenStore& store() const noexcept { return *store_; }
  /// Copies tokens [first, first + tokens.size()) of the part; begins_document[i] is 1 where token i is the first of a document,
  /// else 0. Both spans have the same length, or begins_document is empty: then nobody wants to know.
  void read(std::int64_t first, std::span<std::int32_t> tokens, std::span<std::uint8_t> begins_document) const;

 private:
  friend class PartDocuments;

  [[nodiscard]] bool contains(std::int64_t document) const noexcept;
  /// Tokens of the part in the documents before `document`, for a split by documents. Does not fall as `document` grows.
  [[nodiscard]] std::int64_t part_begin(std::int64_t document) const;
  /// The document that has token `position` of the part.
  [[nodiscard]] std::int64_t document_at(std::int64_t position) const;

  std::shared_ptr<const TokenStore> store_;
  DocumentSplit split_;
  SplitPart part_;
  std::int64_t first_token_ = 0;  ///< of the store, where the split is by position
  std::int64_t num_tokens_ = 0;
  std::vector<std::int64_t> held_out_tokens_;  ///< [held_out + 1] tokens in the first j held-out documents
};

/// The documents of a part in their order. Borrows the part.
class PartDocuments {
 public:
  /// Those with an index of the store in [first, last).
  PartDocuments(const TokenPart& part, std::int64_t first, std::int64_t last);
  /// The next document: the tokens of the store that the part has of it, perhaps none. False behind the last one.
  [[nodiscard]] bool next(Interval& tokens);

 private:
  const TokenPart* part_;
  std::int64_t document_;
  std::int64_t last_;
  std::int64_t held_out_ = 0;  ///< number of the next held-out document, and which it is
  std::int64_t held_out_document_;
  std::int64_t begin_ = -1;  ///< token of the store where document_ begins; -1: not known
};

}  // namespace tandem
