// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "core/rng.h"

/// The operators of a GPT, forward and backward, as their equations say. `Real` is float or double: what every input, every
/// result and every gradient is stored in. Sums within a row (dot products, means, softmax normalisers) run in the order of the
/// index, are accumulated in double for either Real, and are rounded once when stored. The gradient of a parameter, which the
/// micro-batches of a step share, is accumulated in Real, token after token.
///
/// All functions: matrices are row-major, sizes are stated in brackets, spans of other sizes throw ContractError. A result or the
/// gradient of an input is overwritten; the gradient of a parameter is added to what is there, so that micro-batches accumulate.
/// dx is short for the derivative of the loss by x. Call with the type spelled out, `gelu_forward<double>(x, y)`: vectors then
/// convert to spans.
namespace tandem::reference {

/// Multiply-adds of matrix products, for checking a FLOP formula against what the definition executes. Attention counts the
/// pairs of query and key that the causal mask and the document boundaries leave. Additions of biases and everything element by
/// element do not count.
struct MultiplyAdds {
  std::int64_t linear = 0;
  std::int64_t attention = 0;
  [[nodiscard]] std::int64_t total() const noexcept { return linear + attention; }
};

/// out[t] = token_table[ids[t]] + position_table[positions[t]].
/// token_table [vocabulary, hidden], position_table [sequence, hidden], ids and positions [tokens], out [tokens, hidden].
template <class Real>
void embedding_forward(std::span<const Real> token_table, std::span<const Real> position_table, std::span<const std::int32_t> ids,
                       std::span<const std::int32_t> positions, std::span<Real> out);
/// dtoken_table[ids[t]] += dout[t], dposition_table[positions[t]] += dout[t].
template <class Real>
void embedding_backward(std::span<const Real> dout, std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                        std::span<Real> dtoken_table, std::span<Real> dposition_table);

/// What the backward pass of a layer norm needs beside its input. Spans of [rows].
template <class Real>
struct NormStatistics {
  std::span<Real> mean;
  std::span<Real> reciprocal_stddev;  ///< 1 / sqrt(var + epsilon), var with divisor `hidden`
};

/// y = (x - mean) / sqrt(var + epsilon) * weight + bias, row by row. x, y [rows, hidden]; weight, bias [hidden].
template <class Real>
void layer_norm_forward(std::span<const Real> x, std::span<const Real> weight, std::span<const Real> bias, double epsilon,
                        std::span<Real> y, NormStatistics<Real> statistics);
/// With n = (x - mean) * rstd and g = dy * weight: dx = rstd (g - mean(g) - n mean(g n)), dweight += sum dy n, dbias += sum dy.
template <class Real>
void layer_norm_backward(std::span<const Real> x, std::span<const Real> weight, NormStatistics<const Real> statistics,
                         std::span<const Real> dy, std::span<Real> dx, std::span<Real> dweight, std::span<Real> dbias);

/// Of the matrices of a linear layer: x [rows, in], weight [in, out], y [rows, out].
struct LinearSize {
  std::int64_t rows;
  std::int64_t in;
  std::int64_t out;
};

/// y = x W + b. x [rows, in], weight [in, out], bias [out], y [rows, out]. The sum starts from the bias.
template <class Real>
void linear_forward(LinearSize size, std::span<const Real> x, std::span<const Real> weight, std::span<const Real> bias,
                    std::span<Real> y, MultiplyAdds* count = nullptr);
/// dx = dy W^T, dW += x^T dy, db += sum over rows of dy. dbias may be empty.
template <class Real>
void linear_backward(LinearSize size, std::span<const Real> x, std::span<const Real> weight, std::span<const Real> dy,
                     std::span<Real> dx, std::span<Real> dweight, std::span<Real> dbias, MultiplyAdds* count = nullptr);

/// db += sum over rows of dy. dy [rows, out], dbias [out].
template <class Real>
void bias_backward(std::span<const Real> dy, std::span<Real> dbias);

/// logits = x E^T, no bias. x [rows, in], table E [out, in] (wte or lm_head), logits [rows, out].
template <class Real>
void head_forward(LinearSize size, std::span<const Real> x, std::span<const Real> table, std::span<Real> logits,
                  MultiplyAdds* count = nullptr);
/// dx = dlogits E, dE += dlogits^T x.
template <class Real>
void head_backward(LinearSize size, std::span<const Real> x, std::span<const Real> table, std::span<const Real> dlogits,
                   std::span<Real> dx, std::span<Real> dtable, MultiplyAdds* count = nullptr);

/// gelu(x) = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
template <class Real>
void gelu_forward(std::span<const Real> x, std::span<Real> y);
template <class Real>
void gelu_backward(std::span<const Real> x, std::span<const Real> dy, std::span<Real> dx);

/// One dropout mask: its probability and its identity (core/rng.h). Probability 0 is no dropout.
struct Dropout {
  double probability = 0.0;
  DropoutKey key;
};

/// Factor of element `element_index` (the *global* one): 0 where dropped, 1 / (1 - probability) where kept.
template <class Real>
[[nodiscard]] Real dropout_factor(const Dropout& dropout, std::uint64_t element_index);

/// Where the rows of an activation [rows, tokens, width] lie in the global batch, for the index of a mask's element:
///   (row_ids[row] * sequence + token) * width + channel
struct RowPlacement {
  std::span<const std::int64_t> row_ids;  ///< [rows]
  std::int64_t tokens = 0;                ///< tokens of a row in this batch
  std::int64_t sequence = 0;              ///< the model's full sequence; tokens <= sequence
};

/// y = x * factor, element by element; x and y may be the same. Its own backward pass: dx = dy * factor.
template <class Real>
void apply_dropout(const Dropout& dropout, const RowPlacement& rows, std::span<const Real> x, std::span<Real> y);

/// y = a + b.
template <class Real>
void add(std::span<const Real> a, std::span<const Real> b, std::span<Real> y);

/// Sum over the valid tokens of -log softmax(logits)[target], divided by `valid_tokens` (of the whole global batch, not of
/// these rows); 0 where valid_tokens is 0. logits [rows, vocabulary], targets [rows] (kIgnoredTarget takes no part),
/// log_sum_exp [rows].
template <class Real>
[[nodiscard]] double cross_entropy_forward(std::span<const Real> logits, std::span<const std::int32_t> targets,
                                           std::int64_t valid_tokens, std::span<Real> log_sum_exp);
/// dlogits = (softmax(logits) - onehot(target)) / valid_tokens * loss_scale, 0 in rows whose target is ignored.
template <class Real>
void cross_entropy_backward(std::span<const Real> logits, std::span<const std::int32_t> targets, std::int64_t valid_tokens,
                            std::span<const Real> log_sum_exp, std::span<Real> dlogits, double loss_scale = 1.0);

}  // namespace tandem::reference
