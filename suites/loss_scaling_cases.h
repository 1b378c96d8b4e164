// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>

#include "harness/case.h"
#include "suites/parallel_cases.h"

namespace tandem {

/// Parts of the suite; docs/techniques/loss_scaling.md.
void add_precision_cases(CaseList& cases);         ///< layouts in 16 bits against the reference; bytes
void add_scale_invariance_cases(CaseList& cases);  ///< the scale drops out
void add_overflow_cases(CaseList& cases);          ///< one rank's overflow, all ranks' decision
void add_scaler_table_cases(CaseList& cases, const std::filesystem::path& golden_pieces);  ///< the state machine
void add_mixed_resume_cases(CaseList& cases);                                              ///< state that a checkpoint must keep
void add_underflow_cases(CaseList& cases);                                                 ///< what scaling is for
[[nodiscard]] Case fp8_product_case();
void add_fp8_cases(CaseList& cases);

/// "loss_scaling/NAME" with model and plan of `shown`.
[[nodiscard]] Case loss_scaling_case(const std::string& name, const std::string& summary, Criterion criterion,
                                     const ParallelVariant& shown, bool quick = true);

}  // namespace tandem
