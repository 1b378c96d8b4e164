// SPDX-License-Identifier: Apache-2.0
#include "suites/repeated_rows.h"

namespace tandem {
namespace {

void append(Batch& target, const Batch& row) {
  const auto add = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  add(target.ids, row.ids);
  add(target.targets, row.targets);
  add(target.positions, row.positions);
  add(target.document_starts, row.document_starts);
  ++target.rows;
}

}  // namespace

Batch RepeatedRows::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  Batch batch;
  batch.sequence = source_->sequence();
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    Interval owner;  // rows of the rank that computes this row
    for (int rank = 0; rank < ranks_; ++rank) {
      const Interval part = balanced_part(global_rows, ranks_, rank);
      if (row >= part.begin && row < part.end) owner = part;
    }
    const std::int64_t local = row - owner.begin;
    append(batch, source_->training_rows(step, global_rows, {local, local + 1}));
    batch.row_ids.push_back(row);
  }
  return batch;
}

}  // namespace tandem
