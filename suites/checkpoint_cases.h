// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "suites/checkpoint_run.h"
#include "suites/parallel_cases.h"
#include "suites/properties.h"
#include "suites/suites.h"

namespace tandem {

void add_checkpoint_layout_cases(CaseList& cases);
void add_checkpoint_resume_cases(CaseList& cases);
void add_checkpoint_crash_cases(CaseList& cases);
void add_checkpoint_damage_cases(CaseList& cases);
void add_checkpoint_fault_cases(CaseList& cases);
void add_checkpoint_hugging_face_cases(CaseList& cases);
void add_checkpoint_time_cases(CaseList& cases);
/// The properties of its case `blocking`, of so many checkpoints.
[[nodiscard]] std::vector<Property> checkpoint_blocking_times(const RunContext& context, int saves);

/// A case of properties, to be given its execute().
[[nodiscard]] Case checkpoint_case(const std::string& name, const std::string& summary, const ParallelVariant& variant);

/// `variant` with two micro-batches a step.
[[nodiscard]] ParallelVariant accumulating(ParallelVariant variant);

/// A run of `steps` steps that saves into `folder` after those of `saved_after`.
[[nodiscard]] CheckpointScript saving_script(const PairInputs& inputs, const std::filesystem::path& folder, std::int64_t steps,
                                             const std::set<std::int64_t>& saved_after);

}  // namespace tandem
