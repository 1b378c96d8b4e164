// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/pipeline_layout.h"
#include "reference/data_parallel.h"
#include "reference/gpt.h"

/// Pipeline parallelism: the layers are dealt to stages, the stages to P ranks (core/pipeline_layout.h).
///
/// Who holds what: a rank the parameters of its stages' layers; the rank of stage 0 also wte and wpe, that of the last stage also
/// ln_f and the head. A tied head is a second copy of wte, unless both stages are on one rank.
///
/// What is exchanged, n = rows * sequence * hidden being the elements of a micro-batch's activation: at each boundary between
/// stages of different ranks the activation forward and its gradient backward, n elements each. At the end the gradients of the
/// two copies of a tied wte are summed: vocabulary * hidden elements, 2 (2-1)/2 of them sent by each of the two ranks.
///
/// The plain way: one micro-batch after the other, all its forward stages in order, then all its backward stages. Schedules
/// (pipeline_schedules.h) only change when a stage works, not what it computes.
namespace tandem::reference {

struct PipelineParallelLayout {
  PipelineLayout stages;  ///< which layers lie on which rank and chunk
  int micro_batches = 1;  ///< that the rows of the batch are cut into
};

/// Consecutive stages of these numbers of layers, on ranks as PipelineLayout says. Throws ContractError where they are not the
/// model's layers, or not ranks * chunks of them.
[[nodiscard]] PipelineParallelLayout pipeline_stages(const GptConfig& model, int ranks, const std::vector<int>& stage_layers,
                                                     int micro_batches, bool v_shaped = false);

/// Parameters that pipeline rank `rank` holds, whole, in definition order.
[[nodiscard]] std::vector<ParameterSpec> pipeline_parameters(const GptConfig& model, const PipelineLayout& stages, int rank);

/// Whether the model has two copies of wte whose gradients must be summed.
[[nodiscard]] bool has_two_embeddings(const GptConfig& model, const PipelineLayout& stages);

/// Elements that all ranks send together, by purpose.
struct PipelineParallelExchanges {
  std::int64_t activations = 0;
  std::int64_t gradients = 0;  ///< of activations
  std::int64_t embedding = 0;  ///< of the two copies of wte
  friend bool operator==(const PipelineParallelExchanges&, const PipelineParallelExchanges&) = default;
};
/// The closed form for one step of `tokens` tokens over all micro-batches: boundaries * tokens * hidden each way, boundaries
/// being stages - 1, less the one inside a rank where the layout is V-shaped, and 0 on one rank; embedding 2 vocabulary * hidden
/// where there are two copies.
[[nodiscard]] PipelineParallelExchanges pipeline_parallel_exchanges(const GptConfig& model, const PipelineLayout& stages,
                                                                    std::int64_t tokens);

template <class Real>
struct PipelineParallelStep {
  /// Gradients of pipeline_parameters() by global name. The rank of the last stage has the loss, the others 0.
  std::vector<RankGradients<Real>> ranks;
  PipelineParallelExchanges exchanges;
};

/// One step of one data rank up to, but without, the sum of the copies of wte. `batch` is cut into micro-batches by
/// balanced_part. pass.multiply_adds counts over all ranks; pass.trace sees the parts in order of execution; routing is recorded
/// on each rank. Throws as loss_and_gradients().
template <class Real>
[[nodiscard]] PipelineParallelStep<Real> pipeline_parallel_local_gradients(const GptConfig& model,
                                                                           const NamedTensors<Real>& parameters,
                                                                           const Batch& batch,
                                                                           const PipelineParallelLayout& layout,
                                                                           const Pass<Real>& pass);

/// Both copies of wte get the sum of their gradients: that of the embedding plus that of the head.
template <class Real>
void sum_tied_embedding(const GptConfig& model, const PipelineLayout& stages, PipelineParallelStep<Real>& step);

/// Both: what each rank hands to its data-parallel reduction or optimizer.
template <class Real>
[[nodiscard]] PipelineParallelStep<Real> pipeline_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                                     const Batch& batch, const PipelineParallelLayout& layout,
                                                                     const Pass<Real>& pass);

/// Global tensors; wte is that of the rank of stage 0.
template <class Real>
[[nodiscard]] NamedTensors<Real> joined_stages(const GptConfig& model, const PipelineLayout& stages,
                                               const std::vector<RankGradients<Real>>& ranks);

/// L2 norm of the whole gradient: squares summed over ranks, wte counted on the rank of stage 0 alone.
template <class Real>
[[nodiscard]] double pipeline_parallel_norm(const GptConfig& model, const PipelineLayout& stages,
                                            const std::vector<RankGradients<Real>>& ranks);

}  // namespace tandem::reference
