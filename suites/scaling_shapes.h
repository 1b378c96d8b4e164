// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "optimized/scaling/workload.h"

namespace tandem {

/// One device kind without overheads (no launches, no interference, no jitter) and one level of links: on it the simulator's
/// formulas are the closed forms.
[[nodiscard]] ClusterSpec made_up_cluster();
/// The same with nodes of so many devices on faster links.
[[nodiscard]] ClusterSpec made_up_nodes(int per_node);

/// One of results/models/gpt-SIZE.json ("7.5b", "22b", "1t"; "175b" is gpt3-175b) in bf16 on these ranks, `rows` rows in
/// `micro_batches`.
[[nodiscard]] Workload gpt_workload(const std::string& size, ParallelDegrees degrees, std::int64_t rows, int micro_batches);

}  // namespace tandem
