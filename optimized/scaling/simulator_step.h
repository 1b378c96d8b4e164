// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/scaling/simulator.h"

namespace tandem {

/// Private to optimized/scaling/simulator*.cpp: step_seconds, parts and hidden_communication_seconds of a workload without
/// conflicts; nothing else of the estimate.
[[nodiscard]] StepEstimate play_step(const Workload& workload, const ClusterSpec& cluster, const SimulateOptions& options);

}  // namespace tandem
