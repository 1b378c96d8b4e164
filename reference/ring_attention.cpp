// SPDX-License-Identifier: Apache-2.0
#include "reference/ring_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// One head of one row, between the queries of one rank and the keys of another.
struct RingHead {
  const RingAttentionInput& input;
  const ContextSlice& queries;
  const ContextSlice& keys;
  std::int64_t row;
  std::int64_t head;

  [[nodiscard]] std::int64_t size() const { return input.hidden / input.heads; }
  [[nodiscard]] double scale() const { return 1.0 / std::sqrt(static_cast<double>(size())); }
  [[nodiscard]] std::int64_t num_queries() const { return std::ssize(queries.positions); }
  [[nodiscard]] std::int64_t num_keys() const { return std::ssize(keys.positions); }

  /// Both positions are those in the whole row, whatever the slices.
  [[nodiscard]] bool sees(std::int64_t q, std::int64_t k) const {
    const std::int64_t start = queries.batch.document_starts[static_cast<std::size_t>(row * num_queries() + q)];
    const std::int64_t key = keys.positions[static_cast<std::size_t>(k)];
    return start <= key && key <= queries.positions[static_cast<std::size_t>(q)];
  }
  template <class Real>
  [[nodiscard]] Real factor(std::int64_t q, std::int64_t k) const {
    const std::int64_t row_id = queries.batch.row_ids[static_cast<std::size_t>(row)];
    const std::int64_t query = queries.positions[static_cast<std::size_t>(q)];
    const std::int64_t key = keys.positions[static_cast<std::size_t>(k)];
    const std::int64_t element = ((row_id * input.heads + head) * input.sequence + query) * input.sequence + key;
    return dropout_factor<Real>(input.dropout, static_cast<std::uint64_t>(element));
  }
  /// This head's columns of token `token` of the row, in [rows, tokens, hidden].
  template <class T>
  [[nodiscard]] std::span<T> of(std::span<T> values, std::int64_t tokens, std::int64_t token) const {
    return row_of(values, row * tokens + token, input.hidden)
        .subspan(static_cast<std::size_t>(head * size()), static_cast<std::size_t>(size()));
  }
  [[nodiscard]] std::size_t statistic(std::int64_t q) const {
    return static_cast<std::size_t>((row * num_queries() + q) * input.heads + head);
  }
};

template <class Body>
void for_each_ring_head(const RingAttentionInput& input, int rank, int holder, const Body& body) {
  const ContextSlice& queries = input.slices[static_cast<std::size_t>(rank)];
  const ContextSlice& keys = input.slices[static_cast<std::size_t>(holder)];
  TANDEM_CHECK(input.heads > 0 && input.hidden % input.heads == 0, fmt::format("{} heads, hidden {}", input.heads, input.hidden));
  for (std::int64_t row = 0; row < queries.batch.rows; ++row) {
    for (std::int64_t head = 0; head < input.heads; ++head) body(RingHead{input, queries, keys, row, head});
  }
}

/// The third `third` of qkv [tokens, 3 hidden], as [tokens, hidden].
template <class Real>
std::vector<Real> third_of(std::span<const Real> qkv, std::int64_t hidden, std::int64_t third) {
  std::vector<Real> columns;
  for (std::size_t i = 0; i < qkv.size(); ++i) {
    if (static_cast<std::int64_t>(i) % (3 * hidden) / hidden == third) columns.push_back(qkv[i]);
  }
  return columns;
}

template <class Real>
std::vector<Real> joined_thirds(const std::vector<Real>& q, const std::vector<Real>& k, const std::vector<Real>& v,
                                std::int64_t hidden) {
  std::vector<Real> qkv;
  for (std::int64_t begin = 0; begin < std::ssize(q); begin += hidden) {
    for (const std::vector<Real>* third : {&q, &k, &v}) {
      qkv.insert(qkv.end(), third->begin() + begin, third->begin() + begin + hidden);
    }
  }
  return qkv;
}

/// Every rank hands what it holds to the next.
template <class T>
std::vector<T> handed_on(std::vector<T> held) {
  std::rotate(held.rbegin(), held.rbegin() + 1, held.rend());
  return held;
}

template <class Real>
std::vector<KeysValues<Real>> keys_and_values(const RingAttentionInput& input, const PerRank<Real>& qkv) {
  TANDEM_CHECK(qkv.size() == input.slices.size(), fmt::format("{} slices of {} ranks", qkv.size(), input.slices.size()));
  std::vector<KeysValues<Real>> held;
  for (std::size_t r = 0; r < qkv.size(); ++r) {
    const Batch& batch = input.slices[r].batch;
    require_size(std::span(qkv[r]), batch.rows * batch.sequence * 3 * input.hidden, "qkv");
    held.push_back({third_of<Real>(qkv[r], input.hidden, 1), third_of<Real>(qkv[r], input.hidden, 2)});
  }
  return held;
}

template <class Real>
std::int64_t num_elements(const std::vector<KeysValues<Real>>& held) {
  std::int64_t count = 0;
  for (const KeysValues<Real>& of_rank : held) count += std::ssize(of_rank.keys) + std::ssize(of_rank.values);
  return count;
}

/// What the backward pass of a rank's queries reads.
template <class Real>
struct QueriesBackward {
  std::vector<Real> queries;
  std::span<const Real> dout;
  const PartialAttention<Real>& kept;
};

/// Adds to dq, and to the gradients that travel with the keys and values of `head`.
template <class Real>
void backward_of_head(const RingHead& head, const QueriesBackward<Real>& from, const KeysValues<Real>& of_holder,
                      std::vector<Real>& dq, KeysValues<Real>& gradients) {
  const std::int64_t own = head.num_queries();
  const std::int64_t theirs = head.num_keys();
  const auto add_to = [](double factor, std::span<const Real> x, std::span<Real> sum) {
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += static_cast<Real>(factor * static_cast<double>(x[i]));
  };
  for (std::int64_t q = 0; q < own; ++q) {
    const auto query = head.of(std::span(from.queries), own, q);
    const auto gradient = head.of(from.dout, own, q);
    const double sum_p_dp = dot<Real>(gradient, head.of(std::span(from.kept.out), own, q));
    for (std::int64_t k = 0; k < theirs; ++k) {
      if (!head.sees(q, k)) continue;
      const auto key = head.of(std::span(of_holder.keys), theirs, k);
      const Real factor = head.factor<Real>(q, k);
      const double score = dot<Real>(query, key) * head.scale();
      const double p = std::exp(score - from.kept.log_sum_exp[head.statistic(q)]);
      const double dp = factor * dot<Real>(gradient, head.of(std::span(of_holder.values), theirs, k));
      const double dscore = p * (dp - sum_p_dp) * head.scale();
      add_to(dscore, key, head.of(std::span(dq), own, q));
      add_to(dscore, query, head.of(std::span(gradients.keys), theirs, k));
      add_to(p * factor, gradient, head.of(std::span(gradients.values), theirs, k));
    }
  }
}

}  // namespace

template <class Real>
PartialAttention<Real> partial_attention(const RingAttentionInput& input, int rank, int holder, std::span<const Real> qkv,
                                         const KeysValues<Real>& of_holder) {
  const std::vector<Real> queries = third_of(qkv, input.hidden, 0);
  const auto statistics = static_cast<std::int64_t>(queries.size()) / input.hidden * input.heads;
  PartialAttention<Real> part{std::vector<Real>(queries.size(), Real{0}),
                              std::vector<Real>(static_cast<std::size_t>(statistics), -std::numeric_limits<Real>::infinity())};
  for_each_ring_head(input, rank, holder, [&](const RingHead& head) {
    const std::int64_t own = head.num_queries();
    const std::int64_t theirs = head.num_keys();
    for (std::int64_t q = 0; q < own; ++q) {
      std::vector<double> scores(static_cast<std::size_t>(theirs), -std::numeric_limits<double>::infinity());
      for (std::int64_t k = 0; k < theirs; ++k) {
        if (!head.sees(q, k)) continue;
        scores[k] = dot<Real>(head.of(std::span(std::as_const(queries)), own, q), head.of(std::span(of_holder.keys), theirs, k)) *
                    head.scale();
      }
      const double largest = scores.empty() ? -INFINITY : *std::max_element(scores.begin(), scores.end());
      if (std::isinf(largest)) continue;  // sees none of these keys
      double sum = 0.0;
      for (const double score : scores) sum += std::exp(score - largest);
      std::vector<double> out(static_cast<std::size_t>(head.size()));
      for (std::int64_t k = 0; k < theirs; ++k) {
        if (!head.sees(q, k)) continue;
        add_scaled<Real>(std::exp(scores[k] - largest) / sum * head.factor<Real>(q, k),
                         head.of(std::span(of_holder.values), theirs, k), out);
      }
      store<Real>(out, head.of(std::span(part.out), own, q));
      part.log_sum_exp[head.statistic(q)] = static_cast<Real>(largest + std::log(sum));
    }
  });
  return part;
}

template <class Real>
void merge_partial(const PartialAttention<Real>& part, PartialAttention<Real>& into) {
  require_size(std::span(part.out), std::ssize(into.out), "out");
  require_size(std::span(part.log_sum_exp), std::ssize(into.log_sum_exp), "log_sum_exp");
  if (into.out.empty()) return;
  const std::int64_t size = std::ssize(into.out) / std::ssize(into.log_sum_exp);  // of a head
  for (std::int64_t i = 0; i < std::ssize(into.log_sum_exp); ++i) {
    const double a = into.log_sum_exp[i];
    const double b = part.log_sum_exp[i];
    if (std::isinf(a) && std::isinf(b)) continue;
    const double largest = std::max(a, b);
    const double merged = largest + std::log(std::exp(a - largest) + std::exp(b - largest));
    for (std::int64_t c = i * size; c < (i + 1) * size; ++c) {
      into.out[c] = static_cast<Real>(std::exp(a - merged) * into.out[c] + std::exp(b - merged) * part.out[c]);
    }
    into.log_sum_exp[i] = static_cast<Real>(merged);
  }
}

template <class Real>
std::vector<PartialAttention<Real>> ring_attention_forward(const RingAttentionInput& input, const PerRank<Real>& qkv,
                                                           std::int64_t& sent) {
  const auto ranks = static_cast<int>(qkv.size());
  std::vector<KeysValues<Real>> held = keys_and_values(input, qkv);
  std::vector<PartialAttention<Real>> result(qkv.size());
  for (int step = 0; step < ranks; ++step) {
    for (int c = 0; c < ranks; ++c) {
      const auto rank = static_cast<std::size_t>(c);
      auto part = partial_attention<Real>(input, c, (c - step + ranks) % ranks, qkv[rank], held[rank]);
      if (step == 0) {
        result[rank] = std::move(part);
      } else {
        merge_partial(part, result[rank]);
      }
    }
    if (step == ranks - 1) break;
    sent += num_elements(held);
    held = handed_on(std::move(held));
  }
  return result;
}

template <class Real>
PerRank<Real> ring_attention_backward(const RingAttentionInput& input, const PerRank<Real>& qkv,
                                      const std::vector<PartialAttention<Real>>& kept, const PerRank<Real>& dout,
                                      std::int64_t& sent) {
  const auto ranks = static_cast<int>(qkv.size());
  std::vector<KeysValues<Real>> held = keys_and_values(input, qkv);
  std::vector<KeysValues<Real>> gradients;
  PerRank<Real> dq;
  std::vector<QueriesBackward<Real>> own;
  for (std::size_t r = 0; r < qkv.size(); ++r) {
    gradients.push_back({std::vector<Real>(held[r].keys.size(), Real{0}), std::vector<Real>(held[r].values.size(), Real{0})});
    dq.emplace_back(held[r].keys.size(), Real{0});
    own.push_back({third_of<Real>(qkv[r], input.hidden, 0), dout[r], kept[r]});
  }
  for (int step = 0; step < ranks; ++step) {
    for (int c = 0; c < ranks; ++c) {
      const auto rank = static_cast<std::size_t>(c);
      for_each_ring_head(input, c, (c - step + ranks) % ranks,
                         [&](const RingHead& head) { backward_of_head(head, own[rank], held[rank], dq[rank], gradients[rank]); });
    }
    if (ranks == 1) break;
    if (step < ranks - 1) sent += num_elements(held);
    sent += num_elements(gradients);
    held = handed_on(std::move(held));
    gradients = handed_on(std::move(gradients));
  }
  PerRank<Real> dqkv;
  for (std::size_t r = 0; r < qkv.size(); ++r) {
    dqkv.push_back(joined_thirds(dq[r], gradients[r].keys, gradients[r].values, input.hidden));
  }
  return dqkv;
}

template PartialAttention<float> partial_attention(const RingAttentionInput&, int, int, std::span<const float>,
                                                   const KeysValues<float>&);
template PartialAttention<double> partial_attention(const RingAttentionInput&, int, int, std::span<const double>,
                                                    const KeysValues<double>&);
template void merge_partial(const PartialAttention<float>&, PartialAttention<float>&);
template void merge_partial(const PartialAttention<double>&, PartialAttention<double>&);
template std::vector<PartialAttention<float>> ring_attention_forward(const RingAttentionInput&, const PerRank<float>&,
                                                                     std::int64_t&);
template std::vector<PartialAttention<double>> ring_attention_forward(const RingAttentionInput&, const PerRank<double>&,
                                                                      std::int64_t&);
template PerRank<float> ring_attention_backward(const RingAttentionInput&, const PerRank<float>&,
                                                const std::vector<PartialAttention<float>>&, const PerRank<float>&,
                                                std::int64_t&);
template PerRank<double> ring_attention_backward(const RingAttentionInput&, const PerRank<double>&,
                                                 const std::vector<PartialAttention<double>>&, const PerRank<double>&,
                                                 std::int64_t&);

}  // namespace tandem::reference
