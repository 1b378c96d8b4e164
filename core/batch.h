// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace tandem {

/// A target that takes no part in the loss (PyTorch's and Hugging Face's ignore_index).
inline constexpr std::int32_t kIgnoredTarget = -100;

/// Rows of tokens: a whole global batch, or the part of one that a rank computes as one micro-batch. May have no rows.
struct Batch {
  std::int64_t rows = 0;
  std::int64_t sequence = 0;
  std::vector<std::int32_t> ids;        ///< [rows, sequence]
  std::vector<std::int32_t> targets;    ///< [rows, sequence], kIgnoredTarget where not valid
  std::vector<std::int32_t> positions;  ///< [rows, sequence], index into wpe
  /// [rows, sequence] index in its row of the first token of this token's document: attention sees no further back. All zero
  /// when rows are not packed.
  std::vector<std::int32_t> document_starts;
  /// [rows] index of each row in the global batch of its step: the key of dropout masks, so that a row's mask does not depend on
  /// the rank that computes it.
  std::vector<std::int64_t> row_ids;

  /// Number of targets that are not kIgnoredTarget.
  [[nodiscard]] std::int64_t valid_tokens() const noexcept;
};

/// An empty batch of this shape: ids 0, targets ignored, positions 0..sequence-1, one document per row, row_ids 0..rows-1.
[[nodiscard]] Batch make_batch(std::int64_t rows, std::int64_t sequence);

/// Rows [first, first + count), row_ids kept.
[[nodiscard]] Batch slice_rows(const Batch& batch, std::int64_t first, std::int64_t count);

/// Throws InputError where an id or a valid target is outside [0, vocabulary), naming row and position.
void validate_tokens(const Batch& batch, std::int64_t vocabulary);

struct Interval {  ///< [begin, end)
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

/// Part `index` of `total` items dealt to `parts`: contiguous, sizes differ by at most one, the larger ones first; parts beyond
/// `total` are empty.
[[nodiscard]] Interval balanced_part(std::int64_t total, std::int64_t parts, std::int64_t index);

/// Rows of the global batch that data rank `data_rank` computes as micro-batch `micro_batch`: the rows are dealt to the ranks,
/// then each rank's rows to its micro-batches, both by balanced_part.
[[nodiscard]] Interval micro_batch_rows(std::int64_t global_rows, int data_ranks, int data_rank, int micro_batches,
                                        int micro_batch);

}  // namespace tandem
