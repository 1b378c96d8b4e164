// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "suites/anomaly_run.h"
#include "suites/scratch_folder.h"
#include "suites/suites.h"

namespace tandem {

void add_anomaly_policy_cases(CaseList& cases);
void add_anomaly_state_cases(CaseList& cases);
void add_anomaly_detection_cases(CaseList& cases);
void add_anomaly_cost_cases(CaseList& cases);

}  // namespace tandem
