// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "suites/parallel_cases.h"

namespace tandem {

/// Data parallelism alone, where every closed form of the technique holds: bytes at rest and at the peak, bytes on the wire, the
/// share of the unsharded state, and the lockstep reference.
[[nodiscard]] std::vector<Property> zero_data_parallel_properties(const PairInputs& inputs, const EngineRun& run);
/// With other techniques: predicted peaks, and bytes on the wire as the step programs say.
[[nodiscard]] std::vector<Property> zero_composed_properties(const PairInputs& inputs, const EngineRun& run);
/// The optimizer's state has left the device, all of it, and is on the host.
[[nodiscard]] std::vector<Property> zero_offload_properties(const PairInputs& inputs, const EngineRun& run);

/// Parameters are gathered ahead of their use, and not more of them than stated.
void add_zero_prefetch_cases(CaseList& cases);
/// Checkpoints and evaluations of sharded runs.
void add_zero_resume_cases(CaseList& cases);

}  // namespace tandem
