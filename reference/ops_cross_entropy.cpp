// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "core/batch.h"
#include "core/error.h"
#include "reference/ops.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

std::int64_t vocabulary_of(std::size_t logits, std::size_t rows) {
  TANDEM_CHECK(rows > 0 && logits % rows == 0, fmt::format("{} logits in {} rows", logits, rows));
  return static_cast<std::int64_t>(logits / rows);
}

std::int64_t column_of(std::int32_t target, std::int64_t vocabulary) {
  TANDEM_CHECK(target >= 0 && target < vocabulary, fmt::format("target {} is outside the vocabulary of {}", target, vocabulary));
  return target;
}

}  // namespace

template <class Real>
double cross_entropy_forward(std::span<const Real> logits, std::span<const std::int32_t> targets, std::int64_t valid_tokens,
                             std::span<Real> log_sum_exp) {
  if (targets.empty()) return 0.0;
  const auto rows = static_cast<std::int64_t>(targets.size());
  const std::int64_t vocabulary = vocabulary_of(logits.size(), targets.size());
  require_size(log_sum_exp, rows, "log_sum_exp");
  double loss_sum = 0.0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto scores = row_of(logits, row, vocabulary);
    const Real largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (const Real score : scores) sum += std::exp(score - largest);
    log_sum_exp[row] = static_cast<Real>(largest + std::log(sum));
    if (targets[row] == kIgnoredTarget) continue;
    loss_sum += log_sum_exp[row] - scores[column_of(targets[row], vocabulary)];
  }
  return valid_tokens == 0 ? 0.0 : loss_sum / static_cast<double>(valid_tokens);
}

template <class Real>
void cross_entropy_backward(std::span<const Real> logits, std::span<const std::int32_t> targets, std::int64_t valid_tokens,
                            std::span<const Real> log_sum_exp, std::span<Real> dlogits, double loss_scale) {
  if (targets.empty()) return;
  const auto rows = static_cast<std::int64_t>(targets.size());
  const std::int64_t vocabulary = vocabulary_of(logits.size(), targets.size());
  require_size(log_sum_exp, rows, "log_sum_exp");
  require_size(dlogits, rows * vocabulary, "dlogits");
  const auto divisor = static_cast<Real>(valid_tokens);
  const auto factor = static_cast<Real>(loss_scale);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto scores = row_of(logits, row, vocabulary);
    const auto gradient = row_of(dlogits, row, vocabulary);
    std::fill(gradient.begin(), gradient.end(), Real{0});
    if (targets[row] == kIgnoredTarget || valid_tokens == 0) continue;
    const std::int64_t target = column_of(targets[row], vocabulary);
    for (std::int64_t v = 0; v < vocabulary; ++v) {
      const Real probability = std::exp(scores[v] - log_sum_exp[row]);
      gradient[v] = (probability - (v == target ? Real{1} : Real{0})) / divisor * factor;
    }
  }
}

template double cross_entropy_forward(std::span<const float>, std::span<const std::int32_t>, std::int64_t, std::span<float>);
template double cross_entropy_forward(std::span<const double>, std::span<const std::int32_t>, std::int64_t, std::span<double>);
template void cross_entropy_backward(std::span<const float>, std::span<const std::int32_t>, std::int64_t, std::span<const float>,
                                     std::span<float>, double);
template void cross_entropy_backward(std::span<const double>, std::span<const std::int32_t>, std::int64_t,
                                     std::span<const double>, std::span<double>, double);

}  // namespace tandem::reference
