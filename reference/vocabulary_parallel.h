// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/batch.h"
#include "reference/lockstep.h"

/// Embedding and cross-entropy with the vocabulary dealt to T ranks. The table of a rank has R = ceil(V / T) rows; those that
/// belong to no token are padding.
namespace tandem::reference {

/// The tokens [t R, min((t+1) R, V)) that rank t holds; empty where they all lie beyond V.
[[nodiscard]] Interval vocabulary_slice(std::int64_t vocabulary, int ranks, int rank);
/// R.
[[nodiscard]] std::int64_t vocabulary_rows(std::int64_t vocabulary, int ranks);

/// out_r[t] = table_r[ids[t] - begin] where rank r holds that token, zero otherwise: the embedding is the *sum over ranks*.
/// tables[r] [R, hidden], ids [tokens], out_r [tokens, hidden].
template <class Real>
[[nodiscard]] PerRank<Real> vocabulary_lookup(const std::vector<std::span<const Real>>& tables, std::int64_t vocabulary,
                                              std::int64_t hidden, std::span<const std::int32_t> ids);
/// dtable_r[ids[t] - begin] += dout_r[t] where rank r holds the token; dout_r [tokens, hidden] is the same on every rank.
template <class Real>
void vocabulary_lookup_backward(const PerRank<Real>& dout, std::int64_t vocabulary, std::int64_t hidden,
                                std::span<const std::int32_t> ids, const std::vector<std::span<Real>>& dtables);

/// What every rank knows of each token after the exchange of three numbers a token, [tokens] each:
///   largest = max over ranks of the largest own logit                                     all-reduce (max)
///   sum     = sum over ranks of (sum over own tokens v of exp(logit[v] - largest))        all-reduce
///   target  = sum over ranks of (logit of the target where it is own, else 0)             all-reduce
/// Padding takes no part in any of them. A rank that holds padding alone gives -infinity, 0 and 0.
template <class Real>
struct VocabularyStatistics {
  std::vector<Real> largest, sum, target;
};

/// logits_r [tokens, R]; targets [tokens], kIgnoredTarget where not valid.
template <class Real>
[[nodiscard]] VocabularyStatistics<Real> vocabulary_statistics(const PerRank<Real>& logits, std::int64_t vocabulary,
                                                               std::span<const std::int32_t> targets);

/// sum over valid tokens of (largest + log(sum) - target), divided by valid_tokens; 0 where that is 0.
template <class Real>
[[nodiscard]] double vocabulary_loss(const VocabularyStatistics<Real>& statistics, std::span<const std::int32_t> targets,
                                     std::int64_t valid_tokens);

/// dlogits_r[t, v] = (exp(logit - largest) / sum - [v is the target]) / valid_tokens for own v, 0 for padding and in rows without
/// a target. The first term is due on *every* rank, whether it holds the target or not.
template <class Real>
[[nodiscard]] PerRank<Real> vocabulary_loss_backward(const PerRank<Real>& logits, std::int64_t vocabulary,
                                                     const VocabularyStatistics<Real>& statistics,
                                                     std::span<const std::int32_t> targets, std::int64_t valid_tokens);

}  // namespace tandem::reference
