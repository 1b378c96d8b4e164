// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/covering_array.h"
#include "suites/parallel_cases.h"

namespace tandem {

/// The options that hybrid plans are made of, on up to 8 ranks, and the rows of them that are tried.
class HybridOptions {
 public:
  HybridOptions();

  /// Variants with names. suites/hybrid_rows.h has rows in which every pair of option values that can meet does, and every triple
  /// of values of tensor, sequence parallel, pipeline, chunks, data, accumulation, tying and dropout, and of ZeRO stage, tensor,
  /// pipeline, data and recomputation.
  [[nodiscard]] std::vector<std::pair<std::string, ParallelVariant>> named(std::span<const std::string_view> rows) const;

  /// Every stride-th combination of all option values, legal or not.
  void for_each(int stride, const std::function<void(const ParallelVariant&)>& use) const;

  /// Its legal() remembers what it found and does not ask about options that nothing refuses: the search for tuples that no legal
  /// row has goes through millions of rows. For one thread at a time, and for as long as this object lives.
  [[nodiscard]] const CoveringProblem& problem() const noexcept { return problem_; }
  /// What problem().legal(row) stands for, asked anew.
  [[nodiscard]] bool is_legal_without_memory(const Row& row) const;
  [[nodiscard]] ParallelVariant variant_of(const Row& row) const;
  /// "d2-t2s-p2x2-interleaved-c1-m4-untied-packed"
  [[nodiscard]] std::string name_of(const Row& row) const;

 private:
  [[nodiscard]] bool is_legal_row(const Row& row) const;

  CoveringProblem problem_;
  mutable std::vector<std::optional<bool>> known_;  // [row without the options that nothing refuses]
};

/// "0120..." as a row.
[[nodiscard]] Row row_of(std::string_view digits);

}  // namespace tandem
