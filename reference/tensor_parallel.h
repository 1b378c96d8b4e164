// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/batch.h"
#include "core/shard.h"
#include "reference/data_parallel.h"
#include "reference/gpt.h"
#include "reference/lockstep.h"

/// Tensor parallelism, with sequence parallelism on request: T ranks hold slices of the same matrices and work on the same
/// tokens.
///
/// Who holds what, rank t of T (T divides heads and mlp_width):
///   attn.c_attn    weight and bias by columns: those of heads [t H/T, (t+1) H/T) in each of q, k, v, so three runs of columns
///   attn.c_proj    weight by rows, those of the same heads
///   mlp.c_fc       weight and bias by columns [t F/T, (t+1) F/T);   mlp.c_proj  weight by rows [t F/T, (t+1) F/T)
///   wte, lm_head   rows [t R, (t+1) R) of the vocabulary, R = ceil(V / T). Rows from V on are padding: zero, never in a softmax,
///   of
///                  zero gradient
///   all else       replicated: norms, wpe, attn.c_proj.bias, mlp.c_proj.bias
///
/// What is exchanged, n = rows * sequence * hidden being the elements of an activation:
///   layer forward    after attn.c_proj and after mlp.c_proj the partial products are summed over ranks
///   layer backward   before ln_2 and before ln_1 the partial input gradients are summed over ranks
///   embedding        partial look-ups are summed over ranks (a token's row is on one of them)
///   head             backward, the partial gradients of ln_f's output are summed over ranks
///   loss             per token: largest logit, sum of exponentials, logit of the target
/// An all-reduce of n elements is a reduce-scatter and an all-gather: 2 n (T-1) elements sent by all ranks, 2 n (T-1)/T each. A
/// layer has four, 8 n (T-1)/T per rank.
///
/// Sequence parallel: between the matrices, norms, dropout and residuals run on own tokens, part t of the rows * sequence tokens
/// by balanced_part. The sum over ranks becomes a reduce-scatter to own tokens, and before the matrices own tokens are gathered;
/// the backward pass of one is the other. The volume is the same, since gathered norm outputs are kept for the backward pass.
/// Gradients of replicated parameters are then sums over own tokens only: they are summed over ranks at the end.
namespace tandem::reference {

struct TensorParallelLayout {
  int ranks = 1;
  bool sequence_parallel = false;  ///< between the parallel parts each rank holds its own tokens, not all of them
};

/// How a parameter lies on the tensor ranks.
enum class TensorSplit { replicated, columns, qkv_columns, rows, vocabulary };
[[nodiscard]] TensorSplit tensor_split(const ParameterSpec& parameter);

/// The part of `parameter` that tensor rank `rank` of `ranks` holds. Throws ContractError where the ranks do not divide it.
[[nodiscard]] ShardSpec tensor_shard(const ParameterSpec& parameter, int ranks, int rank);

/// Every parameter's part for this rank, of tensors by global name and in global shape; padding is zero.
template <class Real>
[[nodiscard]] NamedTensors<Real> tensor_slices(const GptConfig& model, const NamedTensors<Real>& global, int ranks, int rank);

/// The inverse over all ranks: global tensors. A replicated tensor is that of rank 0.
template <class Real>
[[nodiscard]] NamedTensors<Real> joined_tensors(const GptConfig& model, const std::vector<RankGradients<Real>>& ranks);

/// Elements sent by all ranks together, by purpose.
struct TensorParallelExchanges {
  std::int64_t embedding = 0;
  std::int64_t layers = 0;
  std::int64_t head = 0;
  std::int64_t loss = 0;
  std::int64_t gradients = 0;  ///< of replicated parameters, under sequence parallelism
  friend bool operator==(const TensorParallelExchanges&, const TensorParallelExchanges&) = default;
};

/// What one micro-batch of `tokens` tokens exchanges, in closed form:
///   embedding 2 n (T-1), layers 8 n (T-1) each, head 2 n (T-1), loss 3 * 2 tokens (T-1), n = tokens * hidden
///   gradients 2 k (T-1) under sequence parallelism, k the elements of all replicated parameters; otherwise 0
[[nodiscard]] TensorParallelExchanges tensor_parallel_exchanges(const GptConfig& model, std::int64_t tokens,
                                                                TensorParallelLayout layout);

/// What the ranks hold after one micro-batch.
template <class Real>
struct TensorParallelStep {
  std::vector<RankGradients<Real>> ranks;  ///< local tensors by global name; every rank knows the whole loss of the batch
  TensorParallelExchanges exchanges;
};

/// One micro-batch up to, but without, the sum of the gradients of replicated parameters. `parameters` are global. pass.trace and
/// pass.multiply_adds are not looked at. Throws as loss_and_gradients().
template <class Real>
[[nodiscard]] TensorParallelStep<Real> tensor_parallel_local_gradients(const GptConfig& model,
                                                                       const NamedTensors<Real>& parameters, const Batch& batch,
                                                                       TensorParallelLayout layout, const Pass<Real>& pass);

/// With sequence parallelism the gradient of a replicated parameter becomes its sum over ranks; without, it is whole on each.
template <class Real>
void sum_replicated_gradients(const GptConfig& model, TensorParallelLayout layout, TensorParallelStep<Real>& step);

/// Both: what each rank hands to its data-parallel reduction or optimizer.
template <class Real>
[[nodiscard]] TensorParallelStep<Real> tensor_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                                 const Batch& batch, TensorParallelLayout layout,
                                                                 const Pass<Real>& pass);

/// L2 norm of the whole gradient: the squares of split tensors summed over ranks, those of replicated ones counted once.
template <class Real>
[[nodiscard]] double tensor_parallel_norm(const GptConfig& model, const std::vector<RankGradients<Real>>& ranks);

}  // namespace tandem::reference
