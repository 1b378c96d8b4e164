// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/model_config.h"
#include "reference/mixed_precision.h"
#include "reference/ops.h"
#include "reference/routing.h"
#include "reference/tensors.h"

namespace tandem::reference {

/// Sees every activation and every gradient of an activation, in the order of execution: "embedding", "h.0.ln_1",
/// "h.0.attn.c_attn", ..., "ln_f", "logits", then "d.logits", "d.ln_f", "d.h.1", ... With experts, "h.0.mlp.router" (its logits)
/// and "h.0.mlp" (what the experts add up to) take the place of c_fc, gelu and c_proj. The values are lent for the call only.
template <class Real>
using Tracer = std::function<void(std::string_view name, std::span<const Real> values)>;

/// Which dropout masks a pass uses.
struct DropoutStep {
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
};

/// What a pass needs beside model, parameters and batch.
template <class Real>
struct Pass {
  /// What the loss is divided by: the valid tokens of the *whole* global batch of the step, over all micro-batches and ranks.
  std::int64_t valid_tokens = 0;
  /// What the auxiliary loss of experts is divided by: the rows of the whole global batch, like valid_tokens. 0: the rows of the
  /// batch at hand.
  std::int64_t global_rows = 0;
  std::optional<DropoutStep> dropout = {};  ///< absent: no dropout, as in evaluation
  MultiplyAdds* multiply_adds = nullptr;    ///< added to where given
  Tracer<Real> trace = {};
  RoutingRecord* routing = nullptr;  ///< added to where given, by the forward pass of a model with experts
  /// Where fewer bits than Real has are kept (reference/mixed_precision.h). The parameters given are those at rest. Of the
  /// parallel definitions, data and pipeline parallel alone take rounding and a loss scale.
  Rounding rounding = {};
  /// S: the gradient that leaves the loss, and that of the auxiliary loss, is multiplied by it; so is every gradient that
  /// follows. The loss returned is not.
  double loss_scale = 1.0;
};

/// This batch's share of the loss, and its gradient added to `gradients` (which must hold every parameter: zero_tensors()).
///
///   h = dropout(wte[ids] + wpe[positions])
///   layer: h += dropout(c_proj(attention(c_attn(ln_1(h)))));  h += dropout(mlp(ln_2(h)))
///   mlp(x) = c_proj(gelu(c_fc(x))), or with experts what reference/experts.h says
///   logits = ln_f(h) head^T, head being wte where tied: its gradient is then that of the embedding plus that of the head
///   loss = sum over valid tokens of cross entropy / pass.valid_tokens
///
/// With experts the gradient is that of loss + auxiliary loss (reference/routing.h, summed over layers). The loss returned is the
/// cross-entropy alone; pass.routing reports the other.
///
/// A batch without rows gives 0 and adds nothing. batch.sequence may be shorter than model.sequence. Throws InputError for tokens
/// outside the vocabulary, ContractError for positions outside the table and for parameters that are not the model's.
template <class Real>
double loss_and_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                          const Pass<Real>& pass, NamedTensors<Real>& gradients);

/// The same loss without the backward pass.
template <class Real>
[[nodiscard]] double loss(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                          const Pass<Real>& pass);

/// [rows, sequence of the batch, vocabulary], without dropout; targets are not looked at.
template <class Real>
[[nodiscard]] std::vector<Real> logits(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch);

}  // namespace tandem::reference
