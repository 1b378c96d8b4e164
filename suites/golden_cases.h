// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "suites/suites.h"

namespace tandem {

/// Part of the suite `training`: golden trajectories under the engine, in several precisions and layouts.
void add_golden_cases(CaseList& cases, const SuiteOptions& options);

}  // namespace tandem
