// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "harness/case.h"

namespace tandem {

/// Pipelines whose layers take a stated time, asleep: the idle share that is measured against the closed form of each schedule.
/// Part of pipeline_parallel.
void add_bubble_cases(CaseList& cases);

/// Idle share of each measured step: 1 - compute / (ranks * time from its first to its last computation). `steps`: all, the
/// warm-up included.
[[nodiscard]] std::vector<double> measured_bubbles(const Measured& measured, std::int64_t steps);

}  // namespace tandem
