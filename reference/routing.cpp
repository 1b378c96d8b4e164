// SPDX-License-Identifier: Apache-2.0
#include "reference/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

template <class Real>
std::int64_t num_tokens(const ExpertLayer& layer, const Routing<Real>& routing) {
  return static_cast<std::int64_t>(routing.probabilities.size()) / layer.experts;
}

template <class Real>
void softmax(std::span<const Real> logits, std::span<Real> probabilities) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  for (const Real logit : logits) p.push_back(std::exp(static_cast<double>(logit) - largest));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  store(std::span<const double>(p), probabilities);
}

/// All experts, the likeliest first; the smaller index first among equals.
template <class Real>
std::vector<std::int32_t> by_probability(std::span<const Real> p) {
  std::vector<std::int32_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return p[a] > p[b]; });
  return order;
}

/// What the probabilities of the chosen experts are divided by to give the gates.
template <class Real>
double gate_divisor(const ExpertLayer& layer, std::span<const Real> p, std::span<const std::int32_t> chosen) {
  if (layer.choices == 1) return 1.0;
  double sum = 0.0;
  for (const std::int32_t expert : chosen) sum += static_cast<double>(p[expert]);
  return sum;
}

template <class Real>
void choose_experts(const ExpertLayer& layer, Routing<Real>& routing, std::int64_t token) {
  const auto p = row_of(std::span<const Real>(routing.probabilities), token, layer.experts);
  const auto chosen = row_of(std::span(routing.chosen), token, layer.choices);
  const auto gates = row_of(std::span(routing.gates), token, layer.choices);
  const std::vector<std::int32_t> order = by_probability(p);
  std::copy_n(order.begin(), layer.choices, chosen.begin());
  const double divisor = gate_divisor<Real>(layer, p, chosen);
  for (int i = 0; i < layer.choices; ++i) gates[i] = static_cast<Real>(static_cast<double>(p[chosen[i]]) / divisor);
}

template <class Real>
void fill_slots_of_row(const ExpertLayer& layer, Routing<Real>& routing, std::int64_t row) {
  std::vector<std::int32_t> taken(static_cast<std::size_t>(layer.experts), 0);
  for (int choice = 0; choice < layer.choices; ++choice) {
    for (std::int64_t token = row * layer.row_tokens; token < (row + 1) * layer.row_tokens; ++token) {
      const auto index = static_cast<std::size_t>(token * layer.choices + choice);
      const auto expert = static_cast<std::size_t>(routing.chosen[index]);
      routing.slots[index] = kDropped;
      if (taken[expert] < layer.capacity) {
        routing.slots[index] = taken[expert]++;
        routing.taken[expert].push_back({token, choice});
      }
    }
  }
}

template <class Real>
void count_first_choices(const ExpertLayer& layer, Routing<Real>& routing, std::int64_t row) {
  const auto shares = row_of(std::span(routing.first_shares), row, layer.experts);
  for (std::int64_t token = row * layer.row_tokens; token < (row + 1) * layer.row_tokens; ++token) {
    shares[routing.chosen[static_cast<std::size_t>(token * layer.choices)]] += 1.0 / static_cast<double>(layer.row_tokens);
  }
}

/// dp of one token, from the gates alone.
template <class Real>
void add_gate_gradient(const ExpertLayer& layer, std::span<const Real> p, std::span<const std::int32_t> chosen,
                       std::span<const Real> gates, std::span<const Real> dgates, std::span<double> dp) {
  const double mean = layer.choices == 1 ? 0.0 : dot<Real>(dgates, gates);
  const double divisor = gate_divisor<Real>(layer, p, chosen);
  for (int i = 0; i < layer.choices; ++i) dp[chosen[i]] += (static_cast<double>(dgates[i]) - mean) / divisor;
}

}  // namespace

ExpertLayer expert_layer(const GptConfig& model, std::int64_t row_tokens, std::int64_t global_rows) {
  return {.experts = model.experts,
          .choices = model.expert_choices,
          .hidden = model.hidden,
          .width = model.mlp_width(),
          .row_tokens = row_tokens,
          .capacity = model.expert_capacity(row_tokens),
          .auxiliary_loss_weight = model.auxiliary_loss_weight,
          .global_rows = global_rows};
}

void RoutingRecord::add(const RoutingRecord& other) noexcept {
  auxiliary_loss += other.auxiliary_loss;
  kept_assignments += other.kept_assignments;
  dropped_assignments += other.dropped_assignments;
  smallest_margin = std::min(smallest_margin, other.smallest_margin);
}

template <class Real>
Routing<Real> route(const ExpertLayer& layer, std::span<const Real> x, std::span<const Real> weight, MultiplyAdds* count) {
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / layer.hidden;
  require_size(x, tokens * layer.hidden, "x");
  TANDEM_CHECK(tokens % layer.row_tokens == 0, fmt::format("{} tokens are no whole rows of {}", tokens, layer.row_tokens));
  const std::int64_t rows = tokens / layer.row_tokens;
  const auto count_of = [](std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); };

  Routing<Real> routing;
  routing.logits.resize(count_of(tokens, layer.experts));
  const std::vector<Real> no_bias(static_cast<std::size_t>(layer.experts));
  // The router's logits, like all that routing computes from them, are kept in full.
  const Rounding operands{.products = layer.rounding.products};
  rounded_linear_forward<Real>(operands, "router", {tokens, layer.hidden, layer.experts}, x, weight, no_bias, routing.logits,
                               count);
  routing.probabilities.resize(routing.logits.size());
  routing.chosen.resize(count_of(tokens, layer.choices));
  routing.gates.resize(routing.chosen.size());
  for (std::int64_t token = 0; token < tokens; ++token) {
    softmax(row_of(std::span<const Real>(routing.logits), token, layer.experts),
            row_of(std::span(routing.probabilities), token, layer.experts));
    choose_experts(layer, routing, token);
  }
  routing.slots.resize(routing.chosen.size());
  routing.taken.resize(static_cast<std::size_t>(layer.experts));
  routing.first_shares.resize(count_of(rows, layer.experts));
  for (std::int64_t row = 0; row < rows; ++row) {
    fill_slots_of_row(layer, routing, row);
    count_first_choices(layer, routing, row);
  }
  return routing;
}

template <class Real>
double auxiliary_loss(const ExpertLayer& layer, const Routing<Real>& routing) {
  double sum = 0.0;
  for (std::int64_t token = 0; token < num_tokens(layer, routing); ++token) {
    const auto p = row_of(std::span<const Real>(routing.probabilities), token, layer.experts);
    const auto f = row_of(std::span<const double>(routing.first_shares), token / layer.row_tokens, layer.experts);
    for (int e = 0; e < layer.experts; ++e) sum += f[e] * static_cast<double>(p[e]) / static_cast<double>(layer.row_tokens);
  }
  if (routing.probabilities.empty()) return 0.0;  // a step without rows has no R to divide by
  return layer.auxiliary_loss_weight / static_cast<double>(layer.global_rows) * layer.experts * sum;
}

template <class Real>
void add_to_record(const ExpertLayer& layer, const Routing<Real>& routing, RoutingRecord& record) {
  record.auxiliary_loss += auxiliary_loss(layer, routing);
  for (const std::int32_t slot : routing.slots) ++(slot == kDropped ? record.dropped_assignments : record.kept_assignments);
  const int decisions = std::min(layer.choices, layer.experts - 1);
  for (std::int64_t token = 0; token < num_tokens(layer, routing); ++token) {
    const auto p = row_of(std::span<const Real>(routing.probabilities), token, layer.experts);
    const std::vector<std::int32_t> order = by_probability(p);
    for (int i = 0; i < decisions; ++i) {
      const double margin = static_cast<double>(p[order[i]]) - static_cast<double>(p[order[i + 1]]);
      record.smallest_margin = std::min(record.smallest_margin, margin);
    }
  }
}

template <class Real>
RouterGradients<Real> route_backward(const ExpertLayer& layer, std::span<const Real> x, std::span<const Real> weight,
                                     const Routing<Real>& routing, std::span<const Real> dgates, std::span<Real> dweight,
                                     MultiplyAdds* count) {
  const std::int64_t tokens = num_tokens(layer, routing);
  require_size(dgates, tokens * layer.choices, "dgates");
  RouterGradients<Real> result{std::vector<Real>(routing.logits.size()), std::vector<Real>(x.size())};
  std::vector<double> dp;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const auto p = row_of(std::span<const Real>(routing.probabilities), token, layer.experts);
    const auto f = row_of(std::span<const double>(routing.first_shares), token / layer.row_tokens, layer.experts);
    dp.assign(p.size(), 0.0);
    add_gate_gradient<Real>(layer, p, row_of(std::span(routing.chosen), token, layer.choices),
                            row_of(std::span(routing.gates), token, layer.choices), row_of(dgates, token, layer.choices), dp);
    add_scaled(layer.loss_scale * layer.auxiliary_loss_weight * layer.experts /
                   static_cast<double>(layer.global_rows * layer.row_tokens),
               f, std::span(dp));
    double mean = 0.0;
    for (int e = 0; e < layer.experts; ++e) mean += static_cast<double>(p[e]) * dp[e];
    const auto dlogits = row_of(std::span(result.dlogits), token, layer.experts);
    for (int e = 0; e < layer.experts; ++e) dlogits[e] = static_cast<Real>(static_cast<double>(p[e]) * (dp[e] - mean));
  }
  round_all<Real>(layer.rounding.storage, result.dlogits);
  rounded_linear_backward<Real>(layer.rounding.without_fp8(), "router", {tokens, layer.hidden, layer.experts}, x, weight,
                                result.dlogits, result.dx, dweight, {}, count);
  return result;
}

template Routing<float> route(const ExpertLayer&, std::span<const float>, std::span<const float>, MultiplyAdds*);
template Routing<double> route(const ExpertLayer&, std::span<const double>, std::span<const double>, MultiplyAdds*);
template double auxiliary_loss(const ExpertLayer&, const Routing<float>&);
template double auxiliary_loss(const ExpertLayer&, const Routing<double>&);
template void add_to_record(const ExpertLayer&, const Routing<float>&, RoutingRecord&);
template void add_to_record(const ExpertLayer&, const Routing<double>&, RoutingRecord&);
template RouterGradients<float> route_backward(const ExpertLayer&, std::span<const float>, std::span<const float>,
                                               const Routing<float>&, std::span<const float>, std::span<float>, MultiplyAdds*);
template RouterGradients<double> route_backward(const ExpertLayer&, std::span<const double>, std::span<const double>,
                                                const Routing<double>&, std::span<const double>, std::span<double>,
                                                MultiplyAdds*);

}  // namespace tandem::reference
