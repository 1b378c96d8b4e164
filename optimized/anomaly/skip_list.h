// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "core/batch_source.h"
#include "core/pitfall.h"

namespace tandem {

/// Global batches that are never trained on again, by their place in the data: batch b has the samples b rows to (b + 1) rows - 1
/// of the source's order. A step takes the next batch that is not in the list, so that a run which finds a bad batch on the way
/// and a run that knew of it from the start are the same.
///
///   batch_of(step) = the step-th batch (from 0) that is not in the list
class SkipList {
 public:
  explicit SkipList(std::set<std::int64_t> batches = {}, const PitfallSet& pitfalls = {});
  void add(std::int64_t batch) { batches_.insert(batch); }
  [[nodiscard]] const std::set<std::int64_t>& batches() const noexcept { return batches_; }
  [[nodiscard]] std::int64_t batch_of(std::int64_t step) const;

 private:
  std::set<std::int64_t> batches_;
  PitfallSet pitfalls_;
};

/// The batches of another source without those of a list, which may grow between steps. Thread-safe.
class SkippingSource final : public WrappedSource {
 public:
  /// Borrows `inner`.
  SkippingSource(const BatchSource& inner, SkipList list) : WrappedSource(inner), list_(std::move(list)) {}

  /// From the next call on. Batches that were made before, of later steps, are other ones now: rewind what holds them.
  void set(SkipList list);
  [[nodiscard]] SkipList list() const;
  [[nodiscard]] std::int64_t batch_of(std::int64_t step) const;

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override;
  [[nodiscard]] std::string describe() const override;

 private:
  mutable std::mutex mutex_;
  SkipList list_;
};

}  // namespace tandem
