// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/batch.h"
#include "reference/gpt.h"
#include "reference/tensors.h"

/// Data parallelism with N ranks simulated in lockstep: what each rank holds is an element of a vector, and a collective is a
/// plain loop over it.
namespace tandem::reference {

struct DataParallelLayout {
  int ranks = 1;
  int micro_batches = 1;  ///< of each rank, accumulated one after the other
  friend bool operator==(const DataParallelLayout&, const DataParallelLayout&) = default;
};

/// What a rank holds at the end of its backward passes.
template <class Real>
struct RankGradients {
  double loss = 0.0;             ///< this rank's share; the shares add up to the loss of the step
  NamedTensors<Real> gradients;  ///< sum over its micro-batches, divided by the *global* number of valid tokens
  RoutingRecord routing = {};    ///< of its micro-batches; nothing in a dense model

  /// Like loss: a share, which the reduction adds up.
  [[nodiscard]] double auxiliary_loss() const noexcept { return routing.auxiliary_loss; }
};

/// What a step computes in. By default everything is Real and the loss is not scaled.
struct StepNumerics {
  Rounding rounding = {};
  double loss_scale = 1.0;        ///< contained in all gradients, not in the losses
  DType accumulate = DType::f32;  ///< 16 bits: a rank's gradients are rounded after each micro-batch's have been added
  DType reduce = DType::f32;      ///< 16 bits: gradients travel in them; their sum over ranks is formed in Real and rounded once
};

/// One step up to, but without, the reduction. `batch` is the global batch; its rows are dealt by micro_batch_rows(), and a rank
/// may get none. The result has one element per rank.
template <class Real>
[[nodiscard]] std::vector<RankGradients<Real>> local_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                               const Batch& batch, DataParallelLayout layout,
                                                               const std::optional<DropoutStep>& dropout,
                                                               const StepNumerics& numerics = {});

/// Every rank's values become sum over ranks r = 0, 1, ... of values[r], added in that order in Real. All of one length.
template <class Real>
void all_reduce_sum(std::span<const std::span<Real>> values_of_ranks);

/// Every rank's values become their mean, exchanged as fp16 in both directions:
///   wire[r] = fp16(values[r]);   mean = fp16((sum over r = 0, 1, ... of wire[r], in Real) / ranks)
/// The sum is never an fp16 number, so it cannot overflow where no rank's value did, and nothing is divided before it is
/// summed, so that small values are not flushed to zero.
template <class Real>
void all_reduce_mean_f16(std::span<const std::span<Real>> values_of_ranks);

/// Applies all_reduce_sum to every tensor, and adds up losses and routing: afterwards all elements of `ranks` are equal. Where
/// `wire` has 16 bits, what a rank sends and what it receives is rounded to it.
template <class Real>
void all_reduce_sum(std::vector<RankGradients<Real>>& ranks, DType wire = DType::f32);

/// local_gradients() and the reduction: what every rank hands to its optimizer.
template <class Real>
[[nodiscard]] RankGradients<Real> data_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                          const Batch& batch, DataParallelLayout layout,
                                                          const std::optional<DropoutStep>& dropout,
                                                          const StepNumerics& numerics = {});

}  // namespace tandem::reference
