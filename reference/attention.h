// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "reference/ops.h"

namespace tandem::reference {

/// Causal self-attention of rows of packed documents. Head j is columns [j * size, (j + 1) * size) of each third of qkv.
///   scores[t, s] = q[t] . k[s] / sqrt(size)   for s = document_starts[t] .. t
///   p = softmax(scores);   out[t] = sum over s of p[t, s] * factor[t, s] * v[s]
/// where factor is the dropout mask on probabilities, its element index ((row_id * H + first_head + head) * sequence + t) *
/// sequence + s. H counts the heads of the whole model, of which these may be a part.
struct AttentionInput {
  int heads = 1;
  std::int64_t hidden = 0;
  RowPlacement rows;
  std::span<const std::int32_t> document_starts;  ///< [rows, tokens], index in the row
  Dropout dropout;
  int total_heads = 0;  ///< H; 0 where all of them are here
  int first_head = 0;   ///< which of the H head 0 is
  /// p is rounded to it before anything reads it (a matrix kept in 16 bits); other dtypes stand for Real.
  DType probabilities = DType::f32;
};

/// qkv [rows, tokens, 3 hidden], out [rows, tokens, hidden], probabilities [rows, heads, tokens, tokens]: p before dropout, zero
/// outside the mask. Spans as for ops.h.
template <class Real>
void attention_forward(const AttentionInput& input, std::span<const Real> qkv, std::span<Real> out, std::span<Real> probabilities,
                       MultiplyAdds* count = nullptr);

/// dp[t, s] = factor[t, s] dout[t] . v[s];   dscores = p (dp - sum over s of p dp);
/// dq[t] = sum dscores k / sqrt(size);  dk[s] = sum dscores q / sqrt(size);  dv[s] = sum p factor dout.
template <class Real>
void attention_backward(const AttentionInput& input, std::span<const Real> qkv, std::span<const Real> probabilities,
                        std::span<const Real> dout, std::span<Real> dqkv, MultiplyAdds* count = nullptr);

}  // namespace tandem::reference
