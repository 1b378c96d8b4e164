// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/batch.h"
#include "reference/data_parallel.h"
#include "reference/experts.h"
#include "reference/lockstep.h"

/// Expert parallelism with N ranks in lockstep. The ranks of an expert group are N neighbouring data ranks: rank r of the group
/// holds its own rows, everything of the model that is not an expert, and experts [r E / N, (r + 1) E / N), N dividing E. A layer
/// of experts exchanges four times, each time all to all within the group:
///
///   forward   dispatch   rank -> owner of e    rows of x that e takes
///             combine    owner of e -> rank    what e made of them, in the same order
///   backward  combine    rank -> owner of e    gate dout for the same rows
///             dispatch   owner of e -> rank    their dx
///
/// An owner runs an expert once, on the rows from rank 0, then from rank 1, ... Routing never looks beyond a row
/// (reference/routing.h), so a rank routes its rows alone. A rank without rows still owns experts: it takes part in every
/// exchange.
namespace tandem::reference {

/// The experts that rank `rank` of a group of `ranks` holds. Throws ContractError where `ranks` does not divide `experts`.
[[nodiscard]] Interval own_experts(int experts, int ranks, int rank);

/// What a rank keeps of one layer between the passes.
template <class Real>
struct ExpertRankActivations {
  std::vector<Real> x;                    ///< [own tokens, hidden]
  Routing<Real> routing;                  ///< of own tokens
  OfExperts<Real> returned;               ///< [all experts], what came back for own tokens
  std::vector<MlpActivations<Real>> own;  ///< [own experts], of the rows that arrived
};

/// The layer `name` ("h.0.mlp") of one group: x[r] [own tokens of r, hidden] to out[r]. `kept` becomes one element a rank.
template <class Real>
[[nodiscard]] PerRank<Real> expert_parallel_forward(const ExpertLayer& layer, const std::string& name,
                                                    std::span<const LockstepRank<Real>> group, const PerRank<Real>& x,
                                                    std::vector<ExpertRankActivations<Real>>& kept);

/// Returns dx[r]. Adds to the gradients of each rank: that of the router is of own tokens and still to be summed over all data
/// ranks, those of own experts are of the tokens of the whole group and still to be summed over the groups.
template <class Real>
[[nodiscard]] PerRank<Real> expert_parallel_backward(const ExpertLayer& layer, const std::string& name,
                                                     std::span<LockstepRank<Real>> group,
                                                     const std::vector<ExpertRankActivations<Real>>& kept,
                                                     const PerRank<Real>& dout);

struct ExpertParallelLayout {
  int data = 1;    ///< ranks
  int expert = 1;  ///< ranks of a group; divides data and the model's experts
  int micro_batches = 1;
};

/// What the ranks hold of `parameters`, with gradients of zero.
template <class Real>
[[nodiscard]] std::vector<LockstepRank<Real>> expert_parallel_ranks(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                                    ExpertParallelLayout layout);

/// Element r of each: of data rank r.
template <class Real>
struct ExpertParallelStep {
  std::vector<LockstepRank<Real>> ranks;
  std::vector<double> losses;  ///< shares
  std::vector<RoutingRecord> routing;
};

/// One step up to, but without, the reduction. The rows of `batch`, the global batch, are dealt by micro_batch_rows().
template <class Real>
[[nodiscard]] ExpertParallelStep<Real> expert_parallel_local_gradients(const GptConfig& model,
                                                                       const NamedTensors<Real>& parameters, const Batch& batch,
                                                                       ExpertParallelLayout layout,
                                                                       const std::optional<DropoutStep>& dropout);

/// The step, reduced: gradients that are not of experts are summed over all data ranks, those of an
/// expert over its replicas, one a group. Everything by its global name, as data_parallel_gradients() returns it.
template <class Real>
[[nodiscard]] RankGradients<Real> expert_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                            const Batch& batch, ExpertParallelLayout layout,
                                                            const std::optional<DropoutStep>& dropout);

}  // namespace tandem::reference
