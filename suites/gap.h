// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "harness/case.h"

namespace tandem {

/// Runs of one layout, each made slower for one reason, whose gap to the first must be found to belong to that reason
/// (harness/attribution.h). Part of harness.
void add_gap_case(CaseList& cases);

}  // namespace tandem
