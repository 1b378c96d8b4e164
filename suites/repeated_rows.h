// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/batch_source.h"

namespace tandem {

/// A degenerate input for a pitfall: every one of `ranks` ranks gets the rows that rank 0 gets (their first ones, where it has
/// fewer). Checks that accept it would not notice a missing reduction.
class RepeatedRows final : public BatchSource {
 public:
  RepeatedRows(std::shared_ptr<const BatchSource> source, int ranks) : source_(std::move(source)), ranks_(ranks) {}

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override;
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const override {
    return source_->validation_batch(index, rows);
  }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return source_->vocabulary(); }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return source_->sequence(); }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return source_->training_tokens(); }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return source_->epoch_rows(); }
  [[nodiscard]] std::string describe() const override { return source_->describe() + ", the same rows on every rank"; }

 private:
  std::shared_ptr<const BatchSource> source_;
  int ranks_;
};

}  // namespace tandem
