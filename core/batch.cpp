// SPDX-License-Identifier: Apache-2.0
#include "core/batch.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

namespace tandem {

std::int64_t Batch::valid_tokens() const noexcept {
  return std::count_if(targets.begin(), targets.end(), [](std::int32_t target) { return target != kIgnoredTarget; });
}

Batch make_batch(std::int64_t rows, std::int64_t sequence) {
  Batch batch;
  batch.rows = rows;
  batch.sequence = sequence;
  const auto count = static_cast<std::size_t>(rows * sequence);
  batch.ids.assign(count, 0);
  batch.targets.assign(count, kIgnoredTarget);
  batch.document_starts.assign(count, 0);
  batch.positions.resize(count);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto first = batch.positions.begin() + row * sequence;
    std::iota(first, first + sequence, 0);
  }
  batch.row_ids.resize(static_cast<std::size_t>(rows));
  std::iota(batch.row_ids.begin(), batch.row_ids.end(), std::int64_t{0});
  return batch;
}

Batch slice_rows(const Batch& batch, std::int64_t first, std::int64_t count) {
  TANDEM_CHECK(first >= 0 && count >= 0 && first + count <= batch.rows,
               fmt::format("rows [{}, {}) of {}", first, first + count, batch.rows));
  const auto cut = [](const auto& values, std::int64_t begin, std::int64_t end) {
    return std::decay_t<decltype(values)>(values.begin() + begin, values.begin() + end);
  };
  const std::int64_t begin = first * batch.sequence;
  const std::int64_t end = (first + count) * batch.sequence;
  return {count,
          batch.sequence,
          cut(batch.ids, begin, end),
          cut(batch.targets, begin, end),
          cut(batch.positions, begin, end),
          cut(batch.document_starts, begin, end),
          cut(batch.row_ids, first, first + count)};
}

void validate_tokens(const Batch& batch, std::int64_t vocabulary) {
  const auto require = [&](std::int32_t token, std::size_t index, std::string_view what) {
    if (token >= 0 && token < vocabulary) return;
    const auto sequence = static_cast<std::size_t>(batch.sequence);
    throw InputError(
        fmt::format("{} {} at row {}, position {} is outside the vocabulary of {}; was the data prepared with "
                    "another tokenizer?",
                    what, token, index / sequence, index % sequence, vocabulary));
  };
  for (std::size_t i = 0; i < batch.ids.size(); ++i) require(batch.ids[i], i, "token id");
  for (std::size_t i = 0; i < batch.targets.size(); ++i) {
    if (batch.targets[i] != kIgnoredTarget) require(batch.targets[i], i, "target");
  }
}

Interval balanced_part(std::int64_t total, std::int64_t parts, std::int64_t index) {
  TANDEM_CHECK(parts > 0 && index >= 0 && index < parts && total >= 0);
  const std::int64_t base = total / parts;
  const std::int64_t larger = total % parts;
  const std::int64_t begin = index * base + std::min(index, larger);
  return {begin, begin + base + (index < larger ? 1 : 0)};
}

Interval micro_batch_rows(std::int64_t global_rows, int data_ranks, int data_rank, int micro_batches, int micro_batch) {
  const Interval rank_rows = balanced_part(global_rows, data_ranks, data_rank);
  const Interval part = balanced_part(rank_rows.size(), micro_batches, micro_batch);
  return {rank_rows.begin + part.begin, rank_rows.begin + part.end};
}

}  // namespace tandem
