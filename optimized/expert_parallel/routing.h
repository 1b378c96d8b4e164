// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"

/// The router of a mixture-of-experts layer, on the host: from the router's logits to the places of tokens at experts, and back
/// to the gradient of the logits. A context-parallel rank sees a part of each row only; what needs whole rows (places, and how
/// often an expert is a first choice) takes the choices of all tokens of the row, which the ranks gather in between.
///
/// Tensors are fp32 or fp64, all of a call of one dtype; sums are in double. "tokens" are the local ones, [rows * local_tokens].
/// Shapes are checked (ContractError). No rows are legal.
namespace tandem {

struct RoutingShape {
  std::int64_t rows = 0;
  std::int64_t local_tokens = 0;  ///< of each row, here
  std::int64_t row_tokens = 0;    ///< S, of each row, on all ranks together
  int experts = 1;
  int choices = 1;                      ///< k, experts of a token: 1 or 2
  std::int64_t capacity = 0;            ///< tokens of one row that one expert takes
  std::vector<std::int64_t> positions;  ///< [local_tokens], where in its row each local token stands
};

/// p = softmax(logits), choice 1 = argmax p, choice 2 = argmax of the others, the smallest index on ties. logits and
/// probabilities [tokens, experts]; choices becomes [tokens, k]. Ties are judged on the rounded p.
/// probabilities may be the same memory as logits.
void softmax_choices(TensorView logits, const RoutingShape& shape, TensorView probabilities, std::vector<std::int32_t>& choices);

/// Gates [tokens, k]: p_e of the only choice, or p_ei / (p_e1 + p_e2) of two. A dropped choice keeps its gate; its slot says so.
void choice_gates(TensorView probabilities, const RoutingShape& shape, std::span<const std::int32_t> choices, TensorView gates);

/// From the choices of all tokens of the rows by position, [rows, S, k], the slot of each in its expert's capacity of that row,
/// or -1 where it is dropped: first choices of all tokens come before second ones, and tokens in ascending order of position.
[[nodiscard]] std::vector<std::int32_t> assign_slots(const RoutingShape& shape, std::span<const std::int32_t> row_choices);

/// f [rows, experts]: the share of the row's S tokens whose first choice the expert is, dropped or not. row_choices [rows, S, k].
[[nodiscard]] std::vector<double> first_choice_fractions(const RoutingShape& shape, std::span<const std::int32_t> row_choices);

/// Of [rows, S, k] numbers by position the local tokens' ones, [tokens, k].
[[nodiscard]] std::vector<std::int32_t> local_entries(const RoutingShape& shape, std::span<const std::int32_t> row_entries);

/// The local tokens' share of the load-balancing loss,
///   weight / global_rows * experts * sum over rows and experts of f[row, e] * (sum over the row's local tokens of p_e) / S.
/// Shares of all ranks and micro-batches add up to it.
[[nodiscard]] double auxiliary_loss_share(TensorView probabilities, const RoutingShape& shape, std::span<const double> fractions,
                                          double weight, std::int64_t global_rows);

struct RoutingGradient {
  std::span<const double> fractions;  ///< f [rows, experts], a constant of the gradient
  double auxiliary_scale = 0;         ///< weight * experts / (global_rows * S)
  /// false leaves the load-balancing loss out: of ranks that hold the same tokens one may add it.
  bool add_auxiliary = true;
};

/// dlogits [tokens, experts] from dgates [tokens, k], 0 where dropped:
///   dp_e = auxiliary_scale * f[row, e] + what the gates pass on, with two choices
///   dp_ei += (dg_i - (dg_1 g_1 + dg_2 g_2)) / (p_e1 + p_e2);  with one dp_e1 += dg_1
///   dlogits_e = p_e (dp_e - sum over experts j of p_j dp_j)
void routing_backward(TensorView dgates, TensorView probabilities, const RoutingShape& shape,
                      std::span<const std::int32_t> choices, const RoutingGradient& gradient, TensorView dlogits);

}  // namespace tandem
