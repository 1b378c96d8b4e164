// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/model_config.h"
#include "core/pipeline_layout.h"
#include "core/plan.h"
#include "core/process_grid.h"

/// How the techniques are combined: where each rank stands on the axes data, tensor, pipeline and context, which ranks
/// communicate, and which gradients are added. Everything here is said by enumeration; core/process_grid.h, whose words it uses,
/// computes.
namespace tandem::reference {

struct HybridGrid {
  ParallelDegrees degrees;
  bool v_shaped = false;           ///< schedule zb-v: the pipeline begins and ends on its first rank
  std::vector<Coordinates> ranks;  ///< element r: where rank r stands
};

/// Ranks are numbered by four nested loops, the innermost over the first axis that plan.rank_order names. Throws ContractError
/// where it does not name the four.
[[nodiscard]] HybridGrid hybrid_grid(const TrainingPlan& plan);

/// The groups of one kind: all ranks, dealt by what they must have in common, so that every rank is in one of them.
///
///   world            nothing                          expert           tensor, context, pipeline and data / E
///   data             tensor, context, pipeline        gradient         tensor, pipeline
///   tensor           context, data, pipeline          expert_gradient  tensor, pipeline and data % E
///   pipeline         tensor, context, data            model            context and data / E
///   context          tensor, data, pipeline           embedding        tensor, context, data and, but for the two ends of the
///                                                                      pipeline, pipeline
///
/// E is the expert degree. Members are in ascending order of data, then pipeline, context, tensor.
[[nodiscard]] std::vector<std::vector<int>> hybrid_groups(const HybridGrid& grid, GroupAxis axis);

/// The group that `rank` is in.
[[nodiscard]] std::vector<int> hybrid_group(const HybridGrid& grid, GroupAxis axis, int rank);

/// Whether `rank` holds elements of `parameter`: its pipeline coordinate those of the stages (pipeline_parallel.h), its tensor
/// coordinate those of the slice (tensor_parallel.h), its data coordinate those of the experts: of n experts, those with
/// data % E = expert / (n / E).
[[nodiscard]] bool holds(const HybridGrid& grid, const GptConfig& model, const PipelineLayout& stages,
                         const ParameterSpec& parameter, int rank);

/// The ranks whose local gradients of `parameter` are added to make the gradient that `rank` needs, itself included, ascending;
/// none where it does not hold the parameter. They are the ranks that hold the same elements and whose local gradients are of
/// different things:
///   - of other rows (data) or other tokens (context). The local gradient of an expert is of the rows of its whole expert group,
///   and
///     only ranks with the same experts hold it;
///   - of other uses: the two copies of a tied wte, one as embedding and one as head;
///   - of other parts (tensor): a replicated parameter under sequence parallelism sees own tokens only. A router's weight is
///   partial
///     without it too, since the gradient of the gates is formed from parts of the experts' outputs. The biases of experts are
///     whole on every tensor rank, and so is everything replicated without sequence parallelism: one of the equal copies counts.
[[nodiscard]] std::vector<int> gradient_summands(const HybridGrid& grid, const TrainingPlan& plan, const GptConfig& model,
                                                 const ParameterSpec& parameter, int rank);

/// The same as a sequence of sums over groups, the way it is done: tensor where partial, then gradient or expert_gradient, then
/// embedding where wte is tied.
[[nodiscard]] std::vector<GroupAxis> gradient_sums(const TrainingPlan& plan, const GptConfig& model,
                                                   const ParameterSpec& parameter);

}  // namespace tandem::reference
