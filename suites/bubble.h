// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "harness/case.h"

namespace tandem {

/// Pipelines whose layers take a stated time, asleep: the idle share that is measured against the closed form of each schedule.
/// Part of pipeline_parallel.
void add_bubble_cases(CaseList& cases);

}  // namespace tandem
