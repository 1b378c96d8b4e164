// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "core/model_config.h"
#include "core/process_grid.h"
#include "core/step_program.h"

namespace tandem {

/// The model as one rank computes it: which slice of every width is its own.
struct LocalModel {
  GptConfig model;
  int tensor_ranks = 1, tensor_rank = 0;
  int context_ranks = 1, context_rank = 0;
  int expert_ranks = 1, expert_rank = 0;
  int data_ranks = 1, data_rank = 0;
  bool sequence_parallel = false;
  RecomputeConfig recompute{};
  bool materialized_attention = false;
  int tensor_chunks = 1;  ///< OverlapConfig, at least 1

  [[nodiscard]] int heads() const noexcept { return model.heads / tensor_ranks; }
  [[nodiscard]] std::int64_t attention_width() const noexcept { return model.hidden / tensor_ranks; }
  [[nodiscard]] std::int64_t mlp_width() const noexcept { return model.mlp_width() / tensor_ranks; }
  [[nodiscard]] std::int64_t vocabulary_rows() const;  ///< of the local embedding, padding included
  [[nodiscard]] Interval vocabulary_part() const;      ///< token ids of those that are no padding
  [[nodiscard]] int experts() const noexcept { return expert_ranks > 0 ? model.experts / expert_ranks : 0; }
  [[nodiscard]] int first_expert() const noexcept { return expert_rank * experts(); }
};
[[nodiscard]] LocalModel local_model(const GptConfig& model, const TrainingPlan& plan, const ProcessGrid& grid, int rank);

/// Tokens that one micro-batch of one rank computes.
struct MicroBatchShape {
  std::int64_t rows = 0;
  std::int64_t sequence = 0;              ///< tokens of a row on this rank
  std::int64_t row_tokens = 0;            ///< tokens of a whole row, over the context ranks
  std::vector<std::int64_t> peer_rows{};  ///< [expert ranks] rows of the same micro-batch on each rank of the expert group

  [[nodiscard]] std::int64_t tokens() const noexcept { return rows * sequence; }
};

/// Shape of micro-batch `micro_batch` of this rank, of a global batch of `rows` rows of `row_tokens` tokens.
[[nodiscard]] MicroBatchShape micro_batch_shape(const LocalModel& local, const GlobalBatch& batch, std::int64_t row_tokens,
                                                int micro_batch);

/// Tokens of the micro-batch whose norms, dropout and residual this tensor rank computes: its part under sequence parallelism,
/// else all.
[[nodiscard]] Interval token_slice(const LocalModel& local, const MicroBatchShape& shape);
/// [tensor ranks] sizes of all slices in elements of `width`, for all_gather and reduce_scatter.
[[nodiscard]] std::vector<std::int64_t> slice_counts(const LocalModel& local, const MicroBatchShape& shape, std::int64_t width);

/// Pieces that a product is made in, each summed over the tensor ranks while the next is computed: of attention_out and mlp
/// (forward), mlp and attention_in (backward_input) under sequence parallelism tensor_chunks, or as many as the longest slice has
/// tokens, at least 1; of all else 1. No experts: their products are dealt by expert, not by token.
[[nodiscard]] int product_pieces(const LocalModel& local, const MicroBatchShape& shape, Phase phase, Part part);
/// Piece i of a product is the i-th part of every rank's slice, so that scattering it gives each rank the i-th part of its own.
/// Tokens of that of rank `rank`; may be empty.
[[nodiscard]] Interval piece_of_slice(const LocalModel& local, const MicroBatchShape& shape, int rank, int piece, int pieces);
/// [tensor ranks] sizes of these in elements of `width`.
[[nodiscard]] std::vector<std::int64_t> piece_counts(const LocalModel& local, const MicroBatchShape& shape, int piece, int pieces,
                                                     std::int64_t width);
/// Tokens of all ranks in pieces [0, piece): where the piece begins in a buffer that holds one piece after the other.
[[nodiscard]] std::int64_t piece_begin(const LocalModel& local, const MicroBatchShape& shape, int piece, int pieces);

/// What of a block's activations is kept from its forward to its backward pass; the rest is computed again.
struct BlockStorage {
  bool cheap = true;   ///< outputs of norms and of GELU, materialized attention probabilities
  bool inside = true;  ///< everything else but the block's output
  bool out = true;
  [[nodiscard]] bool all() const noexcept { return cheap && inside && out; }
  [[nodiscard]] bool none() const noexcept { return !cheap && !inside && !out; }
};
/// `layers` are those of the stage that `layer` is in: groups of recompute.layers are counted from its first.
[[nodiscard]] BlockStorage block_storage(const RecomputeConfig& recompute, Interval layers, int layer);

/// Places in the dispatch buffers: for each expert, rows * slots_per_row of this rank, and on the expert's rank those of all
/// peers.
struct ExpertSlots {
  std::int64_t per_row = 0;   ///< min(capacity, local tokens of a row)
  std::int64_t own = 0;       ///< per expert, of this rank's tokens
  std::int64_t received = 0;  ///< per local expert, of all peers' tokens
};
[[nodiscard]] ExpertSlots expert_slots(const LocalModel& local, const MicroBatchShape& shape);

/// Intervals of positions that context rank `rank` holds of a row.
[[nodiscard]] std::vector<Interval> context_intervals(const LocalModel& local, std::int64_t row_tokens, int rank);
[[nodiscard]] std::int64_t context_tokens(const LocalModel& local, std::int64_t row_tokens, int rank);
/// Rank whose keys and values `local` works on in step `ring_step`.
[[nodiscard]] inline int ring_origin(const LocalModel& local, int ring_step) noexcept {
  return (local.context_rank - ring_step + local.context_ranks) % local.context_ranks;
}
/// Pairs (query, key) that see each other between this rank's queries and the keys of context rank `origin`, in one row without
/// documents.
[[nodiscard]] std::int64_t visible_pairs(const LocalModel& local, std::int64_t row_tokens, int origin);

}  // namespace tandem
