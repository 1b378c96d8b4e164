// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/model_config.h"
#include "core/process_grid.h"
#include "core/shard.h"

namespace tandem {

/// What one rank holds of one parameter, and what follows from it for its gradient.
struct LocalParameter {
  ParameterSpec spec;
  ShardSpec shard;
  /// Every tensor rank has the same values but only its part of the gradient: norms and row biases under sequence parallelism,
  /// whose ranks see slices of the tokens; the router, whose ranks see slices of the experts' outputs.
  bool tensor_partial_gradient = false;
  /// A second copy is on the other end of the pipeline (tied token embedding).
  bool tied_copy = false;
  /// Of the copies that tensor ranks and the ends of a pipeline hold, the one that counts in the gradient norm. (Dense parameters
  /// are also on all ranks of an expert group: NormPartials::share() lets one of these speak.)
  bool counts_in_norm = true;

  [[nodiscard]] bool expert() const noexcept { return spec.expert >= 0; }
  [[nodiscard]] std::int64_t num_elements() const { return shard.num_elements(); }
};

/// What `rank` holds, dense parameters in definition order, then those of experts: gradients of the two are summed over different
/// ranks, and each kind is one range of the flat buffer.
///
/// Tensor rank t of T: heads [t H/T, ..) of c_attn (three intervals of columns) and of attn.c_proj (rows), columns [t F/T, ..) of
/// c_fc and rows of mlp.c_proj, rows [t ceil(V/T), ..) of the token embedding and of the head, padded at the end; everything else
/// is replicated.
[[nodiscard]] std::vector<LocalParameter> local_parameters(const GptConfig& model, const TrainingPlan& plan,
                                                           const ProcessGrid& grid, int rank);

}  // namespace tandem
