// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/checkpoint_interval.h"
#include "core/cluster.h"
#include "optimized/scaling/workload.h"

namespace tandem {

/// What failures and the checkpoints against them cost on a described machine.
struct GoodputEstimate {
  double checkpoint_bytes = 0;  ///< of the whole model: parameters as computed with, master copy and moments
  CheckpointCosts costs;        ///< failure_seconds 0: nothing fails
  double interval_seconds = 0;  ///< of work between two checkpoints: Daly's; 0: none are needed
  double useful_share = 1;      ///< of the wall time, with failures at random
  double failures_per_day = 0;
};

/// `async`: training stands still while each device copies its part into host memory (snapshot_bytes_per_second), and a new
/// checkpoint can begin only when the one before it is on storage; otherwise until all is written. The interval is rounded to
/// whole steps. Nothing fails where the cluster says no mean time between failures; nothing is written where it says no
/// bandwidth.
[[nodiscard]] GoodputEstimate estimate_goodput(const Workload& workload, const ClusterSpec& cluster, int devices,
                                               double step_seconds, bool async = true);

}  // namespace tandem
