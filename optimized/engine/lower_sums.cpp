// SPDX-License-Identifier: Apache-2.0
// What tensor ranks sum and gather of activations, and products whose sum goes on while they do.
#include <utility>
#include <vector>

#include "optimized/engine/lowering.h"

namespace tandem {

void Lowering::sum_over_tensor_ranks(const Pass& pass, Part part, int layer) {
  communicate(pass, local_.sequence_parallel ? Collective::reduce_scatter : Collective::all_reduce, GroupAxis::tensor, part,
              layer, pass.shape.tokens() * local_.model.hidden);
}

void Lowering::summed_product(const Pass& pass, Part part, int layer, double flops) {
  const int pieces = product_pieces(local_, pass.shape, pass.phase, part);
  if (pieces == 1) {
    compute(pass, part, layer, flops);
    sum_over_tensor_ranks(pass, part, layer);
    return;
  }
  std::vector<OperationId> sums;
  const auto all = static_cast<double>(pass.shape.tokens());
  for (int piece = 0; piece < pieces; ++piece) {
    const std::int64_t tokens =
        piece_begin(local_, pass.shape, piece + 1, pieces) - piece_begin(local_, pass.shape, piece, pieces);
    compute(pass, part, layer, flops * static_cast<double>(tokens) / all, piece);
    communicate(pass, Collective::reduce_scatter, GroupAxis::tensor, part, layer, tokens * local_.model.hidden, piece,
                Timing::background);
    sums.push_back(static_cast<OperationId>(program_.size()) - 1);
  }
  // Whoever takes the sum up waits for every piece, the last one too.
  if (pitfalls_.on(Pitfall::tensor_chunk_merge_too_early)) {
    late_pieces_ = {sums.back()};
    sums.pop_back();
  }
  pieces_ = std::move(sums);
}

void Lowering::gather_slices(const Pass& pass, Part part, int layer) {
  if (!local_.sequence_parallel) return;
  communicate(pass, Collective::all_gather, GroupAxis::tensor, part, layer, pass.shape.tokens() * local_.model.hidden);
}

}  // namespace tandem
