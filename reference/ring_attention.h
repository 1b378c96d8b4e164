// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/batch.h"
#include "reference/lockstep.h"
#include "reference/ops.h"

/// Causal attention over rows of which each of C ranks holds a slice of the tokens.
namespace tandem::reference {

/// What a context rank holds of every row of a batch.
struct ContextSlice {
  std::vector<std::int64_t> positions;  ///< index in the row of each own token, ascending
  /// The own tokens: `sequence` counts them, `positions` are those of the whole batch (rows of wpe), `document_starts` are
  /// indices in the whole row.
  Batch batch;
};

/// The mask and what the elements of dropout are counted by; see attention.h, whose equations hold with t and s in the whole row.
struct RingAttentionInput {
  int heads = 1;
  std::int64_t hidden = 0;
  std::int64_t sequence = 0;             ///< the model's
  std::span<const ContextSlice> slices;  ///< [ranks]
  Dropout dropout;
};

/// Keys and values of one rank's tokens, as they travel. [rows, own tokens, hidden] each.
template <class Real>
struct KeysValues {
  std::vector<Real> keys, values;
};

/// Attention of a rank's queries over some of the keys: with scores over those keys alone,
///   log_sum_exp = log sum exp(score);   out = sum over s of exp(score[s] - log_sum_exp) factor[s] v[s]
/// A query that sees none of them has log_sum_exp -infinity and out 0.
template <class Real>
struct PartialAttention {
  std::vector<Real> out;          ///< [rows, own tokens, hidden]
  std::vector<Real> log_sum_exp;  ///< [rows, own tokens, heads]
};

/// Queries of rank `rank` (first third of its qkv [rows, own tokens, 3 hidden]) over the keys and values of rank `holder`.
template <class Real>
[[nodiscard]] PartialAttention<Real> partial_attention(const RingAttentionInput& input, int rank, int holder,
                                                       std::span<const Real> qkv, const KeysValues<Real>& of_holder);

/// The exact attention over both sets of keys. With L = log(exp(l_a) + exp(l_b)): out = exp(l_a - L) out_a + exp(l_b - L) out_b.
/// An average of the parts would be right only where both have the same sum of exponentials.
template <class Real>
void merge_partial(const PartialAttention<Real>& part, PartialAttention<Real>& into);

/// The ring: in step s = 0, ..., C-1 rank c works on the keys and values of rank (c - s) mod C, then hands them to rank c + 1.
/// qkv[r] [rows, own tokens, 3 hidden]. `sent` grows by the elements that all ranks send together: 2 (C-1) rows * tokens *
/// hidden.
template <class Real>
[[nodiscard]] std::vector<PartialAttention<Real>> ring_attention_forward(const RingAttentionInput& input,
                                                                         const PerRank<Real>& qkv, std::int64_t& sent);

/// The same ring again; each block of keys and values takes its gradients along, to which every rank adds:
///   p[t, s] = exp(score - log_sum_exp[t]);   dp = factor dout[t] . v[s];   D[t] = dout[t] . out[t]
///   dscore = p (dp - D);   dq[t] += dscore k[s];   dk[s] += dscore q[t];   dv[s] += p factor dout[t]      (scores: 1/sqrt(size))
/// A last hop brings dk and dv home. `sent` grows by 2 (C-1) rows * tokens * hidden for keys and values and 2 C rows * tokens *
/// hidden for their gradients (nothing where C is 1). Returns dqkv.
template <class Real>
[[nodiscard]] PerRank<Real> ring_attention_backward(const RingAttentionInput& input, const PerRank<Real>& qkv,
                                                    const std::vector<PartialAttention<Real>>& kept, const PerRank<Real>& dout,
                                                    std::int64_t& sent);

}  // namespace tandem::reference
