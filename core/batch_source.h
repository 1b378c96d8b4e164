// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/batch.h"

namespace tandem {

/// Where training and validation batches come from. A pure function of its construction and the arguments: any batch can be asked
/// for in any order, by any rank, from any thread, so that a resumed run needs no state but its step.
class BatchSource {
 public:
  virtual ~BatchSource() = default;

  /// Rows [rows.begin, rows.end) of the global batch of `step` (from 0) that has `global_rows` rows; row_ids are the indices in
  /// the global batch. Equal to the same rows of training_batch(), however the rows are dealt to ranks.
  [[nodiscard]] virtual Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const = 0;
  [[nodiscard]] Batch training_batch(std::int64_t step, std::int64_t rows) const { return training_rows(step, rows, {0, rows}); }

  /// Held-out rows [index * rows, (index + 1) * rows) in their fixed order; the last batch may have fewer; empty beyond it.
  [[nodiscard]] virtual std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const = 0;

  /// Every id is in [0, vocabulary()).
  [[nodiscard]] virtual std::int64_t vocabulary() const noexcept = 0;
  /// Most tokens that a row can have; of a source that pads to the longest, a batch may have fewer.
  [[nodiscard]] virtual std::int64_t sequence() const noexcept = 0;
  /// Training tokens that exist; empty when unlimited.
  [[nodiscard]] virtual std::optional<std::int64_t> training_tokens() const noexcept = 0;
  /// Training rows of one epoch; empty when unlimited.
  [[nodiscard]] virtual std::optional<std::int64_t> epoch_rows() const noexcept = 0;
  /// One line for the log: what, how much, how it is split.
  [[nodiscard]] virtual std::string describe() const = 0;
  /// Says the same for sources that give the same batches, and another thing for others: kept in checkpoints. Without paths.
  [[nodiscard]] virtual std::string identity() const { return describe(); }
};

/// Another source, but for what a subclass overrides. Borrows it.
class WrappedSource : public BatchSource {
 public:
  explicit WrappedSource(const BatchSource& inner) : inner_(inner) {}

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    return inner_.training_rows(step, global_rows, rows);
  }
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const override {
    return inner_.validation_batch(index, rows);
  }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return inner_.vocabulary(); }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return inner_.sequence(); }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return inner_.training_tokens(); }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return inner_.epoch_rows(); }
  [[nodiscard]] std::string describe() const override { return inner_.describe(); }
  [[nodiscard]] std::string identity() const override { return inner_.identity(); }

 protected:
  [[nodiscard]] const BatchSource& inner() const noexcept { return inner_; }

 private:
  const BatchSource& inner_;
};

}  // namespace tandem
