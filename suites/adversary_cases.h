// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "suites/parallel_cases.h"

namespace tandem {

/// "SUITE/adversary/NAME": the variant's engine on a transport that does what a network may do (optimized/comm/adversary.h),
/// against the reference as in any other case, and against the same engine on the undisturbed transport: the same bits of every
/// stage, step and replica. The programs that the engine executes are proven. Nothing is measured: the delays are made up.
/// `algorithm` of the collectives; any but `direct` lets threads exchange messages instead of sharing memory.
[[nodiscard]] Case adversary_case(const std::string& suite, const std::string& name, const ParallelVariant& variant,
                                  const std::string& summary, CollectiveAlgorithm algorithm = CollectiveAlgorithm::direct);

}  // namespace tandem
