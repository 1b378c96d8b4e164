// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"

/// How a row's tokens are dealt to context-parallel ranks.
namespace tandem {

/// The positions that `rank` of `ranks` holds, ascending. With C = ranks > 1 the sequence is cut into 2 C chunks by
/// balanced_part(), and rank c holds chunks c and 2 C - 1 - c: under a causal mask an early chunk has little work and a late one
/// much, and each rank gets one of both. One interval, all of it, for one rank. Chunks of a sequence shorter than 2 C may be
/// empty.
[[nodiscard]] std::vector<Interval> context_chunks(std::int64_t sequence, int ranks, int rank);

/// Tokens of a row that `rank` holds.
[[nodiscard]] std::int64_t context_tokens(std::int64_t sequence, int ranks, int rank);

/// The rank's tokens of every row, in ascending order of position: `sequence` is their number per row, all else (positions,
/// document_starts, row_ids) keeps its values.
[[nodiscard]] Batch context_slice(const Batch& batch, int ranks, int rank);

}  // namespace tandem
