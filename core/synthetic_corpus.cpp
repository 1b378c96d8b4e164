// SPDX-License-Identifier: Apache-2.0
#include "core/synthetic_corpus.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/rng.h"

namespace tandem {
namespace {

constexpr std::int64_t kMaxVocabulary = std::int64_t{1} << 20;
constexpr std::uint64_t kWhole = std::uint64_t{1} << 32;

std::vector<std::int32_t> random_permutation(std::int64_t size, CounterRng& rng) {
  std::vector<std::int32_t> permutation(static_cast<std::size_t>(size));
  std::iota(permutation.begin(), permutation.end(), 0);
  for (std::size_t i = permutation.size(); i > 1; --i) std::swap(permutation[i - 1], permutation[rng.next_below(i)]);
  return permutation;
}

/// Weights proportional to 1 / (j + 1) in units of 2^-32; the first takes what rounding down leaves, so that they add up to 1.
std::vector<std::uint64_t> zipf_weights(std::int64_t count) {
  double total = 0;
  for (std::int64_t j = 0; j < count; ++j) total += 1.0 / static_cast<double>(j + 1);
  std::vector<std::uint64_t> weights(static_cast<std::size_t>(count));
  std::uint64_t given = 0;
  for (std::size_t j = 1; j < weights.size(); ++j) {
    weights[j] = static_cast<std::uint64_t>(0x1p32 / (static_cast<double>(j + 1) * total));
    given += weights[j];
  }
  weights[0] = kWhole - given;
  return weights;
}

/// 1 + floor(span u^3): mostly short.
std::int64_t skewed_length(std::int64_t span, CounterRng& rng) {
  const double u = rng.next_unit();
  return 1 + static_cast<std::int64_t>(static_cast<double>(span) * u * u * u);
}

void check(const SyntheticOptions& options) {
  const auto require = [](bool holds, std::string_view field, std::int64_t value, std::string_view range) {
    if (!holds) throw InputError(fmt::format("synthetic corpus: {} is {}, it must be {}", field, value, range));
  };
  require(options.vocabulary >= 1 && options.vocabulary <= kMaxVocabulary, "vocabulary", options.vocabulary,
          fmt::format("from 1 to {}", kMaxVocabulary));
  require(options.branching >= 1 && options.branching <= options.vocabulary, "branching", options.branching,
          fmt::format("from 1 to the vocabulary of {}", options.vocabulary));
  require(options.sequence >= 1, "sequence", options.sequence, "at least 1");
  require(options.validation_rows >= 0, "validation_rows", options.validation_rows, "at least 0");
}

}  // namespace

SyntheticCorpus::SyntheticCorpus(const SyntheticOptions& options) : options_(options) {
  check(options_);
  CounterRng rng(options_.seed, "synthetic/source");
  image_ = random_permutation(options_.vocabulary, rng);
  place_ = random_permutation(options_.vocabulary, rng);
  shifts_ = random_permutation(options_.vocabulary, rng);
  shifts_.resize(static_cast<std::size_t>(options_.branching));
  std::uint64_t sum = 0;
  for (const std::uint64_t weight : zipf_weights(options_.branching)) {
    sum += weight;
    upper_bounds_.push_back(sum);
    const double q = static_cast<double>(weight) * 0x1p-32;
    entropy_rate_nats_ -= q * std::log(q);
  }
}

std::int32_t SyntheticCorpus::successor(std::int32_t symbol, std::uint32_t word) const noexcept {
  const auto j = std::upper_bound(upper_bounds_.begin(), upper_bounds_.end(), std::uint64_t{word}) - upper_bounds_.begin();
  const std::int64_t place = place_[static_cast<std::size_t>(symbol)] + shifts_[static_cast<std::size_t>(j)];
  return image_[static_cast<std::size_t>(place % options_.vocabulary)];
}

double SyntheticCorpus::probability(std::int32_t symbol, std::int32_t next) const {
  TANDEM_CHECK(symbol >= 0 && symbol < options_.vocabulary && next >= 0 && next < options_.vocabulary,
               fmt::format("symbols {} and {} of {}", symbol, next, options_.vocabulary));
  std::uint64_t below = 0;
  for (const std::uint64_t bound : upper_bounds_) {
    if (successor(symbol, static_cast<std::uint32_t>(below)) == next) return static_cast<double>(bound - below) * 0x1p-32;
    below = bound;
  }
  return 0;
}

void SyntheticCorpus::fill_row(Batch& batch, std::int64_t row, std::string_view stream) const {
  CounterRng rng(options_.seed, stream);
  const std::int64_t sequence = options_.sequence;
  const bool packed = options_.row_shape == RowShape::packed;
  const std::int64_t filled = options_.row_shape == RowShape::skewed ? skewed_length(sequence, rng) : sequence;
  std::int64_t begin = 0;
  while (begin < filled) {
    const std::int64_t end = packed ? std::min(sequence, begin + 1 + skewed_length(sequence, rng)) : filled;
    auto symbol = static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(options_.vocabulary)));
    for (std::int64_t t = begin; t < end; ++t) {
      const auto at = static_cast<std::size_t>(row * sequence + t);  // token t of the row in [rows, sequence]
      batch.ids[at] = symbol;
      symbol = successor(symbol, rng.next_u32());
      if (!packed || t + 1 < end) batch.targets[at] = symbol;
      batch.document_starts[at] = static_cast<std::int32_t>(begin);
      batch.positions[at] = static_cast<std::int32_t>(t - begin);
    }
    begin = end;
  }
}

Batch SyntheticCorpus::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  TANDEM_CHECK(step >= 0 && 0 <= rows.begin && rows.begin <= rows.end && rows.end <= global_rows,
               fmt::format("rows [{}, {}) of {} at step {}", rows.begin, rows.end, global_rows, step));
  Batch batch = make_batch(rows.size(), options_.sequence);
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    batch.row_ids[static_cast<std::size_t>(row)] = rows.begin + row;
    fill_row(batch, row, fmt::format("synthetic/train/{}/{}", step, rows.begin + row));
  }
  return batch;
}

std::optional<Batch> SyntheticCorpus::validation_batch(std::int64_t index, std::int64_t rows) const {
  TANDEM_CHECK(index >= 0 && rows >= 1, fmt::format("batch {} of {} rows", index, rows));
  const std::int64_t first = index * rows;
  const std::int64_t count = std::min(rows, options_.validation_rows - first);
  if (count <= 0) return std::nullopt;
  Batch batch = make_batch(count, options_.sequence);
  for (std::int64_t row = 0; row < count; ++row) fill_row(batch, row, fmt::format("synthetic/validation/{}", first + row));
  return batch;
}

std::string SyntheticCorpus::describe() const {
  return fmt::format("synthetic Markov source: {} symbols, {} successors each, entropy rate {:.6f} nats, seed {}",
                     options_.vocabulary, options_.branching, entropy_rate_nats_, options_.seed);
}

std::string SyntheticCorpus::identity() const {
  constexpr std::array kShapes = {"full", "skewed", "packed"};
  return fmt::format("synthetic Markov source; {} symbols, {} successors each; {} rows of {}, {} held out; seed {}",
                     options_.vocabulary, options_.branching, kShapes.at(static_cast<std::size_t>(options_.row_shape)),
                     options_.sequence, options_.validation_rows, options_.seed);
}

}  // namespace tandem
