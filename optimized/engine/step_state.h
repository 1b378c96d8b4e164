// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/engine/engine.h"
#include "optimized/engine/optimizer.h"

namespace tandem {

/// What one training step knows so far.
struct Engine::StepState {
  const Batch& batch;
  std::int64_t step;
  double valid_tokens = 0;  // this rank's part, then of the whole global batch
  double rank_tokens = 0;
  bool tokens_known = false;
  bool totals_shared = false;
  bool norm_known = false;       // the gradients are complete, and their norm has been taken here
  bool overflow_agreed = false;  // all ranks know whether any has a gradient that is not finite
  bool overflowed = false;
  bool reduced_early = false;  // pitfall
  bool touched = false;        // some of this rank's own gradients have been shown before their reduction
  bool own_gradients_finite = true;
  NormPartials partials{};
  double squared_norm = 0;  // of the scaled loss's gradient
  StageTotals totals{};
  StepResult result{};
};

}  // namespace tandem
