// SPDX-License-Identifier: Apache-2.0
#include "reference/vocabulary_parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {

std::int64_t vocabulary_rows(std::int64_t vocabulary, int ranks) { return (vocabulary + ranks - 1) / ranks; }

Interval vocabulary_slice(std::int64_t vocabulary, int ranks, int rank) {
  const std::int64_t rows = vocabulary_rows(vocabulary, ranks);
  return {std::min(rank * rows, vocabulary), std::min((rank + 1) * rows, vocabulary)};
}

template <class Real>
PerRank<Real> vocabulary_lookup(const std::vector<std::span<const Real>>& tables, std::int64_t vocabulary, std::int64_t hidden,
                                std::span<const std::int32_t> ids) {
  PerRank<Real> out;
  for (int r = 0; r < std::ssize(tables); ++r) {
    const Interval own = vocabulary_slice(vocabulary, static_cast<int>(tables.size()), r);
    std::vector<Real>& found = out.emplace_back(ids.size() * static_cast<std::size_t>(hidden), Real{0});
    for (std::size_t t = 0; t < ids.size(); ++t) {
      if (ids[t] < own.begin || ids[t] >= own.end) continue;
      const auto row = row_of(tables[static_cast<std::size_t>(r)], ids[t] - own.begin, hidden);
      std::copy(row.begin(), row.end(), row_of(std::span(found), static_cast<std::int64_t>(t), hidden).begin());
    }
  }
  return out;
}

template <class Real>
void vocabulary_lookup_backward(const PerRank<Real>& dout, std::int64_t vocabulary, std::int64_t hidden,
                                std::span<const std::int32_t> ids, const std::vector<std::span<Real>>& dtables) {
  for (int r = 0; r < std::ssize(dtables); ++r) {
    const auto rank = static_cast<std::size_t>(r);
    const Interval own = vocabulary_slice(vocabulary, static_cast<int>(dtables.size()), r);
    for (std::size_t t = 0; t < ids.size(); ++t) {
      if (ids[t] < own.begin || ids[t] >= own.end) continue;
      const auto gradient = row_of(std::span(dout[rank]), static_cast<std::int64_t>(t), hidden);
      const auto row = row_of(dtables[rank], ids[t] - own.begin, hidden);
      for (std::size_t c = 0; c < row.size(); ++c) row[c] += gradient[c];
    }
  }
}

template <class Real>
VocabularyStatistics<Real> vocabulary_statistics(const PerRank<Real>& logits, std::int64_t vocabulary,
                                                 std::span<const std::int32_t> targets) {
  const auto ranks = static_cast<int>(logits.size());
  const std::int64_t width = vocabulary_rows(vocabulary, ranks);
  VocabularyStatistics<Real> all;
  all.largest.assign(targets.size(), -std::numeric_limits<Real>::infinity());
  all.sum.assign(targets.size(), Real{0});
  all.target.assign(targets.size(), Real{0});
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const auto own_logits = [&](int r) {
      const Interval own = vocabulary_slice(vocabulary, ranks, r);
      const auto row = row_of(std::span(logits[static_cast<std::size_t>(r)]), static_cast<std::int64_t>(t), width);
      return row.first(static_cast<std::size_t>(own.size()));
    };
    for (int r = 0; r < ranks; ++r) {
      for (const Real logit : own_logits(r)) all.largest[t] = std::max(all.largest[t], logit);
    }
    for (int r = 0; r < ranks; ++r) {
      double sum = 0.0;
      for (const Real logit : own_logits(r)) sum += std::exp(logit - all.largest[t]);
      all.sum[t] += static_cast<Real>(sum);
      const Interval own = vocabulary_slice(vocabulary, ranks, r);
      const bool holds_target = targets[t] >= own.begin && targets[t] < own.end;
      all.target[t] += holds_target ? own_logits(r)[static_cast<std::size_t>(targets[t] - own.begin)] : Real{0};
    }
  }
  return all;
}

template <class Real>
double vocabulary_loss(const VocabularyStatistics<Real>& statistics, std::span<const std::int32_t> targets,
                       std::int64_t valid_tokens) {
  double loss_sum = 0.0;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    if (targets[t] == kIgnoredTarget) continue;
    const Real log_sum_exp = statistics.largest[t] + std::log(statistics.sum[t]);
    loss_sum += log_sum_exp - statistics.target[t];
  }
  return valid_tokens == 0 ? 0.0 : loss_sum / static_cast<double>(valid_tokens);
}

template <class Real>
PerRank<Real> vocabulary_loss_backward(const PerRank<Real>& logits, std::int64_t vocabulary,
                                       const VocabularyStatistics<Real>& statistics, std::span<const std::int32_t> targets,
                                       std::int64_t valid_tokens) {
  const auto ranks = static_cast<int>(logits.size());
  const std::int64_t width = vocabulary_rows(vocabulary, ranks);
  PerRank<Real> dlogits;
  for (int r = 0; r < ranks; ++r) {
    const std::vector<Real>& own_logits = logits[static_cast<std::size_t>(r)];
    const Interval own = vocabulary_slice(vocabulary, ranks, r);
    std::vector<Real>& gradient = dlogits.emplace_back(own_logits.size(), Real{0});
    for (std::size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] == kIgnoredTarget || valid_tokens == 0) continue;
      for (std::int64_t v = own.begin; v < own.end; ++v) {
        const std::size_t element = t * static_cast<std::size_t>(width) + static_cast<std::size_t>(v - own.begin);
        const Real probability = std::exp(own_logits[element] - statistics.largest[t]) / statistics.sum[t];
        gradient[element] = (probability - (v == targets[t] ? Real{1} : Real{0})) / static_cast<Real>(valid_tokens);
      }
    }
  }
  return dlogits;
}

template PerRank<float> vocabulary_lookup(const std::vector<std::span<const float>>&, std::int64_t, std::int64_t,
                                          std::span<const std::int32_t>);
template PerRank<double> vocabulary_lookup(const std::vector<std::span<const double>>&, std::int64_t, std::int64_t,
                                           std::span<const std::int32_t>);
template void vocabulary_lookup_backward(const PerRank<float>&, std::int64_t, std::int64_t, std::span<const std::int32_t>,
                                         const std::vector<std::span<float>>&);
template void vocabulary_lookup_backward(const PerRank<double>&, std::int64_t, std::int64_t, std::span<const std::int32_t>,
                                         const std::vector<std::span<double>>&);
template VocabularyStatistics<float> vocabulary_statistics(const PerRank<float>&, std::int64_t, std::span<const std::int32_t>);
template VocabularyStatistics<double> vocabulary_statistics(const PerRank<double>&, std::int64_t, std::span<const std::int32_t>);
template double vocabulary_loss(const VocabularyStatistics<float>&, std::span<const std::int32_t>, std::int64_t);
template double vocabulary_loss(const VocabularyStatistics<double>&, std::span<const std::int32_t>, std::int64_t);
template PerRank<float> vocabulary_loss_backward(const PerRank<float>&, std::int64_t, const VocabularyStatistics<float>&,
                                                 std::span<const std::int32_t>, std::int64_t);
template PerRank<double> vocabulary_loss_backward(const PerRank<double>&, std::int64_t, const VocabularyStatistics<double>&,
                                                  std::span<const std::int32_t>, std::int64_t);

}  // namespace tandem::reference
