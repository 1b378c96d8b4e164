// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/piece_index.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/data_pipeline/in_parallel.h"

namespace tandem {
namespace {

std::int64_t pieces_of(Interval tokens, std::int64_t sequence) {
  return std::max<std::int64_t>(0, (tokens.size() - 1 + sequence - 1) / sequence);
}

}  // namespace

PieceCursor::PieceCursor(const TokenPart& part, std::int64_t sequence, std::int64_t first_document, std::int64_t last_document)
    : documents_(part, first_document, last_document), sequence_(sequence) {}

bool PieceCursor::next(Piece& piece) {
  while (left_.size() < 2) {
    if (!documents_.next(left_)) return false;
  }
  piece = {left_.begin, std::min(sequence_, left_.size() - 1)};
  left_.begin += piece.pairs;
  return true;
}

void PieceCursor::skip(std::int64_t count) {
  for (std::int64_t here = pieces_of(left_, sequence_); count >= here; here = pieces_of(left_, sequence_)) {
    count -= here;
    if (!documents_.next(left_)) {
      left_ = {0, 0};
      return;
    }
  }
  left_.begin += count * sequence_;
}

PieceIndex::PieceIndex(const TokenPart& part, std::int64_t sequence) : part_(part), sequence_(sequence) {
  constexpr std::int64_t kEntriesPerThread = 4096;
  const std::int64_t documents = part.store().num_documents();
  const std::int64_t entries = (documents + kDocumentsPerEntry - 1) / kDocumentsPerEntry;
  before_.assign(static_cast<std::size_t>(entries) + 1, 0);
  in_parallel(entries, kEntriesPerThread, [&](Interval mine) {
    for (std::int64_t entry = mine.begin; entry < mine.end; ++entry) {
      const std::int64_t first = entry * kDocumentsPerEntry;
      PartDocuments walk(part, first, std::min(first + kDocumentsPerEntry, documents));
      Interval tokens;
      std::int64_t pieces = 0;
      while (walk.next(tokens)) pieces += pieces_of(tokens, sequence);
      before_[static_cast<std::size_t>(entry) + 1] = pieces;
    }
  });
  for (std::size_t i = 1; i < before_.size(); ++i) before_[i] += before_[i - 1];
}

Piece PieceIndex::piece(std::int64_t number) const {
  Piece piece;
  TANDEM_CHECK(number >= 0 && number < num_pieces() && from(number).next(piece),
               fmt::format("piece {} of {}", number, num_pieces()));
  return piece;
}

PieceCursor PieceIndex::from(std::int64_t number) const {
  const auto entry =
      std::max<std::int64_t>(0, std::upper_bound(before_.begin(), before_.end() - 1, number) - before_.begin() - 1);
  PieceCursor cursor(part_, sequence_, entry * kDocumentsPerEntry, part_.store().num_documents());
  cursor.skip(number - before_[static_cast<std::size_t>(entry)]);
  return cursor;
}

}  // namespace tandem
