// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "harness/case.h"

namespace tandem {

struct SuiteOptions {
  std::filesystem::path results_folder;      ///< results/ of the project: its golden sets
  std::filesystem::path more_golden_folder;  ///< further golden sets; cases that need them are skipped where they are not there
};

/// Every case of every suite, in the order in which they run. The only list of suites.
[[nodiscard]] CaseList all_cases(const SuiteOptions& options);

void add_data_parallel_cases(CaseList& cases);
void add_tensor_parallel_cases(CaseList& cases);
void add_pipeline_parallel_cases(CaseList& cases);
void add_context_parallel_cases(CaseList& cases);
void add_expert_parallel_cases(CaseList& cases);
void add_hybrid_parallel_cases(CaseList& cases);
void add_recomputation_cases(CaseList& cases);
void add_zero_cases(CaseList& cases);
/// Techniques on a transport that completes late and out of order; each case belongs to the suite of its technique.
void add_adversary_cases(CaseList& cases);
void add_overlap_cases(CaseList& cases);
void add_compression_cases(CaseList& cases);
void add_collectives_cases(CaseList& cases);
void add_checkpoint_cases(CaseList& cases);
void add_recovery_cases(CaseList& cases);
void add_anomaly_cases(CaseList& cases);
void add_data_pipeline_cases(CaseList& cases);
void add_loss_scaling_cases(CaseList& cases, const SuiteOptions& options);
void add_training_cases(CaseList& cases, const SuiteOptions& options);
void add_scaling_cases(CaseList& cases);
/// The judge's own measurements, checked against answers known without them.
void add_harness_cases(CaseList& cases);

}  // namespace tandem
