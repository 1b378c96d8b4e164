// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "suites/parallel_cases.h"
#include "suites/properties.h"
#include "suites/recovery_run.h"
#include "suites/suites.h"

namespace tandem {

void add_recovery_fault_cases(CaseList& cases);
void add_recovery_tier_cases(CaseList& cases);
void add_recovery_shrink_cases(CaseList& cases);
void add_recovery_detector_cases(CaseList& cases);
void add_recovery_straggler_cases(CaseList& cases);
void add_recovery_time_cases(CaseList& cases);
void add_recovery_hang_cases(CaseList& cases);

/// A case of properties, to be given its execute().
[[nodiscard]] Case recovery_case(const std::string& name, const std::string& summary, const ParallelVariant& variant);

/// A script on the variant's inputs: nine steps, a checkpoint after each third, no faults yet. Limits of the detector are wide:
/// who wants to see a hang says otherwise.
[[nodiscard]] RecoveryScript recovery_script(const ParallelVariant& variant, const RunContext& context);

}  // namespace tandem
