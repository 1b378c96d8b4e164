// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/local_model.h"

#include <algorithm>
#include <numeric>

#include "optimized/context_parallel/zigzag.h"
#include "optimized/tensor_parallel/vocabulary_loss.h"

namespace tandem {

std::int64_t LocalModel::vocabulary_rows() const { return padded_vocabulary(model.vocabulary, tensor_ranks) / tensor_ranks; }

Interval LocalModel::vocabulary_part() const { return tandem::vocabulary_part(model.vocabulary, tensor_ranks, tensor_rank); }

LocalModel local_model(const GptConfig& model, const TrainingPlan& plan, const ProcessGrid& grid, int rank) {
  const Coordinates here = grid.coordinates(rank);
  const ParallelDegrees& degrees = plan.parallel;
  return {model,
          degrees.tensor,
          here.tensor,
          degrees.context,
          here.context,
          degrees.expert,
          here.data % degrees.expert,
          degrees.data,
          here.data,
          plan.sequence_parallel,
          plan.recompute,
          plan.attention == "materialized",
          plan.overlap.tensor_chunks};
}

MicroBatchShape micro_batch_shape(const LocalModel& local, const GlobalBatch& batch, std::int64_t row_tokens, int micro_batch) {
  const auto rows_of = [&](int data_rank) {
    return micro_batch_rows(batch.rows, local.data_ranks, data_rank, batch.micro_batches, micro_batch).size();
  };
  MicroBatchShape shape;
  shape.rows = rows_of(local.data_rank);
  shape.sequence = context_tokens(local, row_tokens, local.context_rank);
  shape.row_tokens = row_tokens;
  for (int peer = 0; peer < local.expert_ranks; ++peer) {
    shape.peer_rows.push_back(rows_of(local.data_rank - local.expert_rank + peer));
  }
  return shape;
}

Interval token_slice(const LocalModel& local, const MicroBatchShape& shape) {
  if (!local.sequence_parallel) return {0, shape.tokens()};
  return balanced_part(shape.tokens(), local.tensor_ranks, local.tensor_rank);
}

std::vector<std::int64_t> slice_counts(const LocalModel& local, const MicroBatchShape& shape, std::int64_t width) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < local.tensor_ranks; ++rank) {
    counts.push_back(balanced_part(shape.tokens(), local.tensor_ranks, rank).size() * width);
  }
  return counts;
}

int product_pieces(const LocalModel& local, const MicroBatchShape& shape, Phase phase, Part part) {
  const bool forward = phase == Phase::forward || phase == Phase::recompute;
  const bool of_mlp = part == Part::mlp && phase != Phase::backward_weight;
  const bool scattered =
      of_mlp || (forward && part == Part::attention_out) || (phase == Phase::backward_input && part == Part::attention_in);
  if (!local.sequence_parallel || !scattered) return 1;
  const std::int64_t longest = (shape.tokens() + local.tensor_ranks - 1) / local.tensor_ranks;
  return static_cast<int>(std::clamp<std::int64_t>(longest, 1, local.tensor_chunks));
}

Interval piece_of_slice(const LocalModel& local, const MicroBatchShape& shape, int rank, int piece, int pieces) {
  const Interval slice = balanced_part(shape.tokens(), local.tensor_ranks, rank);
  const Interval part = balanced_part(slice.size(), pieces, piece);
  return {slice.begin + part.begin, slice.begin + part.end};
}

std::vector<std::int64_t> piece_counts(const LocalModel& local, const MicroBatchShape& shape, int piece, int pieces,
                                       std::int64_t width) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < local.tensor_ranks; ++rank) {
    counts.push_back(piece_of_slice(local, shape, rank, piece, pieces).size() * width);
  }
  return counts;
}

std::int64_t piece_begin(const LocalModel& local, const MicroBatchShape& shape, int piece, int pieces) {
  std::int64_t begin = 0;
  for (int before = 0; before < piece; ++before) {
    const std::vector<std::int64_t> counts = piece_counts(local, shape, before, pieces, 1);
    begin = std::accumulate(counts.begin(), counts.end(), begin);
  }
  return begin;
}

BlockStorage block_storage(const RecomputeConfig& recompute, Interval layers, int layer) {
  if (recompute.mode == "none") return {};
  if (recompute.mode == "selective") return {false, true, true};
  const bool ends_group = (layer - layers.begin + 1) % recompute.layers == 0 || layer + 1 == layers.end;
  return {false, false, ends_group};
}

ExpertSlots expert_slots(const LocalModel& local, const MicroBatchShape& shape) {
  ExpertSlots slots;
  slots.per_row = std::min(local.model.expert_capacity(shape.row_tokens), shape.sequence);
  slots.own = shape.rows * slots.per_row;
  for (const std::int64_t rows : shape.peer_rows) slots.received += rows * slots.per_row;
  return slots;
}

std::vector<Interval> context_intervals(const LocalModel& local, std::int64_t row_tokens, int rank) {
  return context_chunks(row_tokens, local.context_ranks, rank);
}

std::int64_t context_tokens(const LocalModel& local, std::int64_t row_tokens, int rank) {
  return context_tokens(row_tokens, local.context_ranks, rank);
}

std::int64_t visible_pairs(const LocalModel& local, std::int64_t row_tokens, int origin) {
  std::int64_t pairs = 0;
  for (const Interval& queries : context_intervals(local, row_tokens, local.context_rank)) {
    for (const Interval& keys : context_intervals(local, row_tokens, origin)) {
      for (std::int64_t query = queries.begin; query < queries.end; ++query) {
        pairs += std::clamp<std::int64_t>(query + 1 - keys.begin, 0, keys.size());
      }
    }
  }
  return pairs;
}

}  // namespace tandem
