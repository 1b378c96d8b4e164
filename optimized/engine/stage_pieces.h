// SPDX-License-Identifier: Apache-2.0
// Private to the files of GptStage.
#pragma once

#include "optimized/engine/gpt_stage.h"

namespace tandem {

template <class Use>
void GptStage::for_tokens_of_piece(const Operation& op, TensorView whole, const Use& use) const {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const int pieces = product_pieces(local_, shape, op.phase, op.part);
  if (pieces == 1) {
    use(Interval{0, shape.tokens()}, whole);
    return;
  }
  const TensorView partial = workspace(op).partial;
  std::int64_t at = piece_begin(local_, shape, op.piece, pieces);
  for (int rank = 0; rank < local_.tensor_ranks; ++rank) {
    const Interval tokens = piece_of_slice(local_, shape, rank, op.piece, pieces);
    if (tokens.size() > 0) use(tokens, partial.rows(at, tokens.size()));
    at += tokens.size();
  }
}

/// Rows of a tensor that has one for each token.
[[nodiscard]] inline TensorView rows_of(TensorView all, Interval tokens) { return all.rows(tokens.begin, tokens.size()); }

}  // namespace tandem
