// SPDX-License-Identifier: Apache-2.0
#include "optimized/context_parallel/zigzag.h"

#include <fmt/format.h>

namespace tandem {

std::vector<Interval> context_chunks(std::int64_t sequence, int ranks, int rank) {
  TANDEM_CHECK(ranks > 0 && rank >= 0 && rank < ranks, fmt::format("rank {} of {}", rank, ranks));
  if (ranks == 1) return {{0, sequence}};
  const std::int64_t chunks = 2 * std::int64_t{ranks};
  return {balanced_part(sequence, chunks, rank), balanced_part(sequence, chunks, chunks - 1 - rank)};
}

std::int64_t context_tokens(std::int64_t sequence, int ranks, int rank) {
  std::int64_t tokens = 0;
  for (const Interval& chunk : context_chunks(sequence, ranks, rank)) tokens += chunk.size();
  return tokens;
}

Batch context_slice(const Batch& batch, int ranks, int rank) {
  const std::vector<Interval> chunks = context_chunks(batch.sequence, ranks, rank);
  const auto cut = [&](const std::vector<std::int32_t>& values) {
    std::vector<std::int32_t> result;
    for (std::int64_t row = 0; row < batch.rows; ++row) {
      const auto first = values.begin() + row * batch.sequence;
      for (const Interval& chunk : chunks) result.insert(result.end(), first + chunk.begin, first + chunk.end);
    }
    return result;
  };
  return {batch.rows,           context_tokens(batch.sequence, ranks, rank),
          cut(batch.ids),       cut(batch.targets),
          cut(batch.positions), cut(batch.document_starts),
          batch.row_ids};
}

}  // namespace tandem
