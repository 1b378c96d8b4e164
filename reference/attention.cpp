// SPDX-License-Identifier: Apache-2.0
#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "reference/mixed_precision.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// One head of one row: where its numbers lie, and which keys each query sees.
struct Head {
  const AttentionInput& input;
  std::int64_t row;
  std::int64_t head;
  std::int64_t size;

  [[nodiscard]] std::int64_t first_key(std::int64_t query) const {
    const std::int64_t start = input.document_starts[row * input.rows.tokens + query];
    TANDEM_CHECK(start >= 0 && start <= query, fmt::format("document of token {} starts at {}", query, start));
    return start;
  }
  /// This head's columns of token t in the third `third` (0 q, 1 k, 2 v) of [rows, tokens, 3 hidden].
  template <class T>
  [[nodiscard]] std::span<T> of_qkv(std::span<T> qkv, std::int64_t third, std::int64_t t) const {
    const std::int64_t token = row * input.rows.tokens + t;
    return qkv.subspan(static_cast<std::size_t>(token * 3 * input.hidden + third * input.hidden + head * size),
                       static_cast<std::size_t>(size));
  }
  /// This head's columns of token t of [rows, tokens, hidden].
  template <class T>
  [[nodiscard]] std::span<T> of_output(std::span<T> out, std::int64_t t) const {
    const std::int64_t token = row * input.rows.tokens + t;
    return out.subspan(static_cast<std::size_t>(token * input.hidden + head * size), static_cast<std::size_t>(size));
  }
  /// Probabilities of query t over all keys, of [rows, heads, tokens, tokens].
  template <class T>
  [[nodiscard]] std::span<T> of_probabilities(std::span<T> probabilities, std::int64_t t) const {
    return row_of(probabilities, (row * input.heads + head) * input.rows.tokens + t, input.rows.tokens);
  }
  template <class Real>
  [[nodiscard]] Real factor(std::int64_t t, std::int64_t s) const {
    const std::int64_t sequence = input.rows.sequence;
    const std::int64_t heads = input.total_heads > 0 ? input.total_heads : input.heads;
    const std::int64_t mask_row = (input.rows.row_ids[row] * heads + input.first_head + head) * sequence + t;
    const std::int64_t element_index = mask_row * sequence + s;
    return dropout_factor<Real>(input.dropout, static_cast<std::uint64_t>(element_index));
  }
};

double score_scale(const Head& head) { return 1.0 / std::sqrt(static_cast<double>(head.size)); }

template <class Real>
void head_attention_forward(const Head& head, std::span<const Real> qkv, std::span<Real> out, std::span<Real> probabilities) {
  for (std::int64_t t = 0; t < head.input.rows.tokens; ++t) {
    const std::int64_t first = head.first_key(t);
    const auto p = head.of_probabilities(probabilities, t);
    std::fill(p.begin(), p.end(), Real{0});
    for (std::int64_t s = first; s <= t; ++s) {
      p[s] = static_cast<Real>(dot<Real>(head.of_qkv(qkv, 0, t), head.of_qkv(qkv, 1, s)) * score_scale(head));
    }
    const Real largest = *std::max_element(p.begin() + first, p.begin() + t + 1);
    double sum = 0.0;
    for (std::int64_t s = first; s <= t; ++s) {
      p[s] = std::exp(p[s] - largest);
      sum += p[s];
    }
    for (std::int64_t s = first; s <= t; ++s) p[s] = rounded(static_cast<Real>(p[s] / sum), head.input.probabilities);

    std::vector<double> sums(static_cast<std::size_t>(head.size));
    for (std::int64_t s = first; s <= t; ++s) {
      add_scaled<Real>(p[s] * head.factor<Real>(t, s), head.of_qkv(qkv, 2, s), sums);
    }
    store<Real>(sums, head.of_output(out, t));
  }
}

template <class Real>
void head_attention_backward(const Head& head, std::span<const Real> qkv, std::span<const Real> probabilities,
                             std::span<const Real> dout, std::span<Real> dqkv) {
  const std::int64_t tokens = head.input.rows.tokens;
  std::vector<double> dq(static_cast<std::size_t>(tokens * head.size)), dk(dq.size()), dv(dq.size());
  std::vector<double> dp(static_cast<std::size_t>(tokens));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t first = head.first_key(t);
    const auto p = head.of_probabilities(probabilities, t);
    const auto gradient = head.of_output(dout, t);
    double sum_p_dp = 0.0;
    for (std::int64_t s = first; s <= t; ++s) {
      const Real factor = head.factor<Real>(t, s);
      dp[s] = factor * dot(gradient, head.of_qkv(qkv, 2, s));
      sum_p_dp += p[s] * dp[s];
      add_scaled(p[s] * factor, gradient, row_of(std::span(dv), s, head.size));
    }
    for (std::int64_t s = first; s <= t; ++s) {
      const double dscore = p[s] * (dp[s] - sum_p_dp) * score_scale(head);
      add_scaled(dscore, head.of_qkv(qkv, 1, s), row_of(std::span(dq), t, head.size));
      add_scaled(dscore, head.of_qkv(qkv, 0, t), row_of(std::span(dk), s, head.size));
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    store(row_of(std::span<const double>(dq), t, head.size), head.of_qkv(dqkv, 0, t));
    store(row_of(std::span<const double>(dk), t, head.size), head.of_qkv(dqkv, 1, t));
    store(row_of(std::span<const double>(dv), t, head.size), head.of_qkv(dqkv, 2, t));
  }
}

/// Calls body(head) for every head of every row, and returns the multiply-adds of one matrix product over what they see.
template <class Body>
std::int64_t for_each_head(const AttentionInput& input, const Body& body) {
  TANDEM_CHECK(input.heads > 0 && input.hidden % input.heads == 0, fmt::format("{} heads, hidden {}", input.heads, input.hidden));
  const auto rows = static_cast<std::int64_t>(input.rows.row_ids.size());
  std::int64_t multiply_adds = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t h = 0; h < input.heads; ++h) {
      const Head head{input, row, h, input.hidden / input.heads};
      body(head);
      for (std::int64_t t = 0; t < input.rows.tokens; ++t) multiply_adds += (t + 1 - head.first_key(t)) * head.size;
    }
  }
  return multiply_adds;
}

template <class Real>
void require_sizes(const AttentionInput& input, std::span<Real> qkv, std::size_t out, std::size_t probabilities) {
  const auto rows = static_cast<std::int64_t>(input.rows.row_ids.size());
  const std::int64_t tokens = rows * input.rows.tokens;
  require_size(input.document_starts, tokens, "document_starts");
  require_size(qkv, tokens * 3 * input.hidden, "qkv");
  TANDEM_CHECK(static_cast<std::int64_t>(out) == tokens * input.hidden, fmt::format("output has {} elements", out));
  TANDEM_CHECK(static_cast<std::int64_t>(probabilities) == tokens * input.heads * input.rows.tokens,
               fmt::format("probabilities have {} elements", probabilities));
}

}  // namespace

template <class Real>
void attention_forward(const AttentionInput& input, std::span<const Real> qkv, std::span<Real> out, std::span<Real> probabilities,
                       MultiplyAdds* count) {
  require_sizes(input, qkv, out.size(), probabilities.size());
  const std::int64_t product =
      for_each_head(input, [&](const Head& head) { head_attention_forward(head, qkv, out, probabilities); });
  if (count != nullptr) count->attention += 2 * product;  // q k^T and p v
}

template <class Real>
void attention_backward(const AttentionInput& input, std::span<const Real> qkv, std::span<const Real> probabilities,
                        std::span<const Real> dout, std::span<Real> dqkv, MultiplyAdds* count) {
  require_sizes(input, qkv, dout.size(), probabilities.size());
  require_size(dqkv, static_cast<std::int64_t>(qkv.size()), "dqkv");
  const std::int64_t product =
      for_each_head(input, [&](const Head& head) { head_attention_backward(head, qkv, probabilities, dout, dqkv); });
  if (count != nullptr) count->attention += 4 * product;  // dout v^T, p^T dout, dscores k and dscores^T q
}

template void attention_forward(const AttentionInput&, std::span<const float>, std::span<float>, std::span<float>, MultiplyAdds*);
template void attention_forward(const AttentionInput&, std::span<const double>, std::span<double>, std::span<double>,
                                MultiplyAdds*);
template void attention_backward(const AttentionInput&, std::span<const float>, std::span<const float>, std::span<const float>,
                                 std::span<float>, MultiplyAdds*);
template void attention_backward(const AttentionInput&, std::span<const double>, std::span<const double>, std::span<const double>,
                                 std::span<double>, MultiplyAdds*);

}  // namespace tandem::reference
