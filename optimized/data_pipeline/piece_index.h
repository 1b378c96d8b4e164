// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "optimized/data_pipeline/token_part.h"

namespace tandem {

/// A piece of a document (core/text_data.h): pairs (token, next token) from one place of the store on.
struct Piece {
  std::int64_t first_token = 0;  ///< of the store
  std::int64_t pairs = 0;        ///< reads one token more than this
};

/// Pieces one after the other. Borrows the part.
class PieceCursor {
 public:
  PieceCursor(const TokenPart& part, std::int64_t sequence, std::int64_t first_document, std::int64_t last_document);
  /// The next piece; false behind the last one.
  [[nodiscard]] bool next(Piece& piece);
  /// Leaves `count` pieces out, document by document.
  void skip(std::int64_t count);

 private:
  PartDocuments documents_;
  std::int64_t sequence_;
  Interval left_{0, 0};  ///< of the document under way, not yet cut
};

/// Pieces of a part by their number. Memory: 8 bytes for every kDocumentsPerEntry documents of the store.
class PieceIndex {
 public:
  /// A number is found by bisection among entries, then by walking at most this many documents.
  static constexpr std::int64_t kDocumentsPerEntry = 64;

  /// Borrows `part`. Reads where each of its documents begins, with several threads where there are many.
  PieceIndex(const TokenPart& part, std::int64_t sequence);

  [[nodiscard]] std::int64_t num_pieces() const noexcept { return before_.back(); }
  /// Throws ContractError unless `number` is in [0, num_pieces()).
  [[nodiscard]] Piece piece(std::int64_t number) const;
  /// The pieces from `number` on; `number` may be num_pieces().
  [[nodiscard]] PieceCursor from(std::int64_t number) const;

 private:
  const TokenPart& part_;
  std::int64_t sequence_;
  std::vector<std::int64_t> before_;  ///< [entries + 1] pieces in the documents before each entry's first
};

}  // namespace tandem
