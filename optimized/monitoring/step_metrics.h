// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/memory_ledger.h"

namespace tandem {

/// One step, for people and for their tools.
struct StepMetrics {
  std::int64_t step = 0;  ///< steps done, from 1
  std::int64_t total_steps = 0;
  double unix_seconds = 0;
  std::uint64_t attempt = 0;
  double loss = 0, gradient_norm = 0, learning_rate = 0, loss_scale = 1;
  std::int64_t tokens = 0;  ///< trained in this step
  double step_seconds = 0;
  double tokens_per_second = 0;
  double communication_share = 0;  ///< of the step, on rank 0: something is on its way
  double exposed_share = 0;        ///< and nothing is computed meanwhile
  double data_wait_share = 0;
  std::int64_t memory_bytes = 0;  ///< of rank 0 by its ledger, now
  std::int64_t peak_memory_bytes = 0;
  std::int64_t skipped_steps = 0;         ///< so far
  std::int64_t incidents = 0;             ///< so far
  std::string last_incident;              ///< one line; empty: none
  std::optional<double> validation_loss;  ///< where it was taken after this step
};

}  // namespace tandem
