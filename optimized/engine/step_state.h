// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/engine/engine.h"

namespace tandem {

/// What one training step knows so far.
struct Engine::StepState {
  const Batch& batch;
  std::int64_t step;
  double valid_tokens = 0;  // this rank's part, then of the whole global batch
  double rank_tokens = 0;
  bool tokens_known = false;
  bool norm_known = false;
  bool reduced_early = false;  // pitfall
  double squared_norm = 0;
  StageTotals totals{};
  StepResult result{};
};

}  // namespace tandem
