// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/model_config.h"
#include "reference/mixed_precision.h"
#include "reference/ops.h"

/// The router of a mixture-of-experts MLP: which experts see a token, with what weight, and what balances their load.
namespace tandem::reference {

/// Sizes of a mixture-of-experts MLP in one pass. Tokens come in whole rows of row_tokens each.
struct ExpertLayer {
  int experts = 1;
  int choices = 1;  ///< experts of a token: 1 or 2
  std::int64_t hidden = 0;
  std::int64_t width = 0;       ///< of the hidden layer of each expert
  std::int64_t row_tokens = 0;  ///< S
  std::int64_t capacity = 0;    ///< tokens of one row that one expert takes
  double auxiliary_loss_weight = 0.0;
  std::int64_t global_rows = 0;  ///< R: rows of the whole global batch of the step
  Rounding rounding = {};
  double loss_scale = 1.0;  ///< dgates contain it, and the gradient of the auxiliary loss is multiplied by it
};
[[nodiscard]] ExpertLayer expert_layer(const GptConfig& model, std::int64_t row_tokens, std::int64_t global_rows);

/// What the routers of a pass did, added up over layers and micro-batches.
struct RoutingRecord {
  double auxiliary_loss = 0.0;  ///< the share of the rows seen; shares add up to the auxiliary loss of the step
  std::int64_t kept_assignments = 0;
  std::int64_t dropped_assignments = 0;
  /// The smallest difference between two softmax probabilities that decided a choice: largest and second largest of a token, for
  /// two choices also second and third largest. Rounding of that size may choose otherwise. Infinity where nothing was decided.
  double smallest_margin = std::numeric_limits<double>::infinity();

  void add(const RoutingRecord& other) noexcept;
};

/// The slot of an assignment that its expert has no room for.
inline constexpr std::int32_t kDropped = -1;

/// Choice `choice` of token `token`.
struct Assignment {
  std::int64_t token;
  int choice;
  friend bool operator==(const Assignment&, const Assignment&) = default;
};

/// The routing of the tokens of some rows.
template <class Real>
struct Routing {
  std::vector<Real> logits;                    ///< [tokens, experts]
  std::vector<Real> probabilities;             ///< [tokens, experts]
  std::vector<std::int32_t> chosen;            ///< [tokens, choices], the expert
  std::vector<Real> gates;                     ///< [tokens, choices]
  std::vector<std::int32_t> slots;             ///< [tokens, choices], in [0, capacity) of the token's row and expert, or kDropped
  std::vector<double> first_shares;            ///< [rows, experts], f
  std::vector<std::vector<Assignment>> taken;  ///< [experts], what the expert takes: row after row, in the order of the slots
};

/// With W the router's weight [hidden, experts], for each token x [hidden]:
///   logits = x W;   p = softmax(logits);   e_1 = argmax p, e_2 = argmax of the others, the smallest index among equals
///   one choice: gate = p_e1;   two choices: gate_i = p_ei / (p_e1 + p_e2)
/// and in each row, for choice i = 1, 2, for its tokens in order: expert e_i keeps the token in its next slot while it has taken
/// fewer than `capacity` of this row, and otherwise drops it. All first choices come before the second ones. The gate of a
/// token's other choice is what it would be had nothing been dropped. Neither padding nor documents matter: all tokens take part,
/// and no row can change what becomes of another.
template <class Real>
[[nodiscard]] Routing<Real> route(const ExpertLayer& layer, std::span<const Real> x, std::span<const Real> weight,
                                  MultiplyAdds* count = nullptr);

/// The share of these rows in the auxiliary loss, in double:
///   auxiliary = weight / R * sum over rows of E * sum over experts e of f_e P_e
/// with f_e the share of the row's tokens whose first choice is e, dropped or not, and P_e the mean of p_e over the row's tokens.
/// 1 * weight where the load is even.
template <class Real>
[[nodiscard]] double auxiliary_loss(const ExpertLayer& layer, const Routing<Real>& routing);

/// Adds this layer's routing.
template <class Real>
void add_to_record(const ExpertLayer& layer, const Routing<Real>& routing, RoutingRecord& record);

template <class Real>
struct RouterGradients {
  std::vector<Real> dlogits;  ///< [tokens, experts]
  std::vector<Real> dx;       ///< [tokens, hidden], what reaches x through the router
};

/// dgates [tokens, choices], 0 where dropped. Gradient of loss and auxiliary loss, f being a constant:
///   one choice: dp_e1 = dgate;   two choices: dp_ei = (dgate_i - sum over j of dgate_j gate_j) / (p_e1 + p_e2)
///   dp_e += loss_scale * weight / R * E f_e / S
///   dlogits = p (dp - sum over e of p_e dp_e);   dx = dlogits W^T;   dW += x^T dlogits
template <class Real>
[[nodiscard]] RouterGradients<Real> route_backward(const ExpertLayer& layer, std::span<const Real> x,
                                                   std::span<const Real> weight, const Routing<Real>& routing,
                                                   std::span<const Real> dgates, std::span<Real> dweight,
                                                   MultiplyAdds* count = nullptr);

}  // namespace tandem::reference
