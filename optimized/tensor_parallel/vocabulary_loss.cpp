// SPDX-License-Identifier: Apache-2.0
#include "optimized/tensor_parallel/vocabulary_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

namespace tandem {
namespace {

/// Calls f with the view's elements as spans of float or of double.
template <class F>
auto with_elements_of(const TensorView& view, F f) {
  if (view.dtype() == DType::f32) return f(float{});
  TANDEM_CHECK(view.dtype() == DType::f64, "losses are merged in fp32 and fp64");
  return f(double{});
}

template <class Real>
void merge(std::span<const Real> gathered, std::span<Real> logsumexp, std::span<Real> target_logit) {
  const std::size_t tokens = logsumexp.size();
  const std::size_t ranks = gathered.size() / (3 * tokens);
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto entry = [&](std::size_t rank, std::size_t which) {
      return static_cast<double>(gathered[(rank * tokens + t) * 3 + which]);
    };
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t rank = 0; rank < ranks; ++rank) largest = std::max(largest, entry(rank, 0));
    double sum = 0, target = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      // A rank that holds padding alone has a sum of 0 and no largest logit; NaN goes on into the sum.
      if (entry(rank, 1) != 0) sum += entry(rank, 1) * std::exp(entry(rank, 0) - largest);
      target += entry(rank, 2);
    }
    logsumexp[t] = static_cast<Real>(largest + std::log(sum));
    target_logit[t] = static_cast<Real>(target);
  }
}

}  // namespace

std::int64_t padded_vocabulary(std::int64_t vocabulary, int ranks) {
  TANDEM_CHECK(vocabulary >= 0 && ranks > 0);
  return (vocabulary + ranks - 1) / ranks * ranks;
}

Interval vocabulary_part(std::int64_t vocabulary, int ranks, int rank) {
  TANDEM_CHECK(rank >= 0 && rank < ranks, fmt::format("rank {} of {}", rank, ranks));
  const std::int64_t rows = padded_vocabulary(vocabulary, ranks) / ranks;
  return {std::min(vocabulary, rank * rows), std::min(vocabulary, (rank + 1) * rows)};
}

void merge_statistics(TensorView gathered, TensorView logsumexp, TensorView target_logit) {
  const std::int64_t tokens = logsumexp.num_elements();
  TANDEM_CHECK(target_logit.num_elements() == tokens);
  if (tokens == 0) return;
  TANDEM_CHECK(gathered.num_elements() > 0 && gathered.num_elements() % (3 * tokens) == 0,
               fmt::format("statistics are {}, tokens {}", to_string(gathered.shape()), tokens));
  with_elements_of(
      gathered, [&]<class Real>(Real) { merge<Real>(gathered.as<const Real>(), logsumexp.as<Real>(), target_logit.as<Real>()); });
}

double loss_sum(TensorView logsumexp, TensorView target_logit, std::span<const std::int32_t> targets) {
  TANDEM_CHECK(logsumexp.num_elements() == static_cast<std::int64_t>(targets.size()));
  TANDEM_CHECK(target_logit.num_elements() == logsumexp.num_elements());
  return with_elements_of(logsumexp, [&]<class Real>(Real) {
    const std::span<const Real> whole = logsumexp.as<const Real>(), part = target_logit.as<const Real>();
    double sum = 0;
    for (std::size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] != kIgnoredTarget) sum += static_cast<double>(whole[t]) - static_cast<double>(part[t]);
    }
    return sum;
  });
}

double merged_loss(Memory& memory, TensorView gathered, TensorView logsumexp, TensorView target_logit,
                   std::span<const std::int32_t> targets) {
  const HostView statistics(memory, gathered, Access::read);
  HostView whole(memory, logsumexp, Access::write), part(memory, target_logit, Access::write);
  merge_statistics(statistics.view(), whole.view(), part.view());
  whole.finish();
  part.finish();
  return loss_sum(whole.view(), part.view(), targets);
}

}  // namespace tandem
