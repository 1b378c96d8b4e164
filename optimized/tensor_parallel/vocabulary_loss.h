// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "core/batch.h"
#include "core/tensor.h"
#include "kernels/memory.h"

/// The cross-entropy of logits whose columns, the vocabulary, are dealt to tensor-parallel ranks. Each rank makes the statistics
/// of its columns (Kernels::cross_entropy_statistics), all ranks gather them, and each merges them by the functions here: the
/// same bits on every rank.
namespace tandem {

/// Vp = ranks * ceil(vocabulary / ranks): rows of an embedding of which every rank holds the same number, Vp / ranks. Those at
/// and beyond `vocabulary` are padding.
[[nodiscard]] std::int64_t padded_vocabulary(std::int64_t vocabulary, int ranks);

/// The tokens whose rows and columns `rank` holds, padding left out: [rank, rank + 1) * Vp / ranks, cut at `vocabulary`. May be
/// empty.
[[nodiscard]] Interval vocabulary_part(std::int64_t vocabulary, int ranks, int rank);

/// gathered [ranks, tokens, 3] holds of each rank and token {largest logit m, sum s of exp(logit - m), logit of the target or 0}.
///   logsumexp = M + log(sum over ranks of s exp(m - M)), M the largest m;  target_logit = sum over ranks of the third entry
/// Sums in double, in order of rank. logsumexp, target_logit [tokens]; all of one dtype, fp32 or fp64 (ContractError otherwise).
void merge_statistics(TensorView gathered, TensorView logsumexp, TensorView target_logit);

/// Sum of logsumexp - target_logit over the tokens whose target is not kIgnoredTarget, in double, in order. Targets are those of
/// the whole vocabulary.
[[nodiscard]] double loss_sum(TensorView logsumexp, TensorView target_logit, std::span<const std::int32_t> targets);

/// Both, of tensors in `memory`: logsumexp and target_logit are written, the sum returned. On a device it waits for `gathered`.
[[nodiscard]] double merged_loss(Memory& memory, TensorView gathered, TensorView logsumexp, TensorView target_logit,
                                 std::span<const std::int32_t> targets);

}  // namespace tandem
