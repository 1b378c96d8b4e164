// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch_source.h"

namespace tandem {

/// How the rows of the synthetic corpus are filled.
///   full    every target valid
///   skewed  a row has 1 + floor(T u^3) valid targets, u uniform: mostly few, sometimes nearly T; the tail is padding (id 0, no
///           target). For checks of normalisation by token count.
///   packed  independent documents of such lengths one after the other, the last one cut; positions and document_starts restart,
///           and the last token of each has no target
enum class RowShape : std::uint8_t { full, skewed, packed };

struct SyntheticOptions {
  std::int64_t vocabulary = 64;
  std::int64_t branching = 8;  ///< successors of each symbol; 1 <= branching <= vocabulary
  std::int64_t sequence = 64;
  std::uint64_t seed = 1;  ///< of the source and of the rows
  RowShape row_shape = RowShape::full;
  std::int64_t validation_rows = 256;
};

/// A Markov source of order one whose entropy rate is known exactly, and unlimited batches of it.
///
///   P(next = a((b(s) + c_j) mod V) | s) = q_j,   j = 0 .. branching - 1,   q_j proportional to 1 / (j + 1)
///
/// with a, b permutations of the V symbols and c_j distinct shifts, all drawn from the seed. Every symbol has the same row of
/// probabilities in another order, so the entropy rate is H = -sum_j q_j ln q_j whatever the stationary distribution. Every
/// column holds the same probabilities too, so that the uniform distribution of the first symbol is kept: each symbol is equally
/// likely at each place. A model that knows the last symbol reaches a loss of H on every target, and none does better in
/// expectation; a model that ignores the context reaches ln V.
///
/// The q_j are whole multiples of 2^-32, compared with whole random words: H is that of the sampler, not of an approximation.
class SyntheticCorpus final : public BatchSource {
 public:
  /// Throws InputError where an option is out of range.
  explicit SyntheticCorpus(const SyntheticOptions& options);

  /// H in nats: expected loss floor of every valid target.
  [[nodiscard]] double entropy_rate_nats() const noexcept { return entropy_rate_nats_; }
  /// P(next | symbol).
  [[nodiscard]] double probability(std::int32_t symbol, std::int32_t next) const;

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override;
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return options_.vocabulary; }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return options_.sequence; }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string identity() const override;

 private:
  void fill_row(Batch& batch, std::int64_t row, std::string_view stream) const;
  [[nodiscard]] std::int32_t successor(std::int32_t symbol, std::uint32_t word) const noexcept;

  SyntheticOptions options_;
  std::vector<std::int32_t> image_;          ///< a
  std::vector<std::int32_t> place_;          ///< b
  std::vector<std::int32_t> shifts_;         ///< c
  std::vector<std::uint64_t> upper_bounds_;  ///< upper_bounds_[j] = 2^32 (q_0 + ... + q_j)
  double entropy_rate_nats_ = 0;
};

}  // namespace tandem
