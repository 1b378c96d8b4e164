// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/own_parts.h"
#include "harness/case.h"

namespace tandem {

/// The cases with somebody's own parts in place of this program's: what judges our half judges theirs, with the same inputs,
/// bounds and properties. To be had from all_cases() by select_cases(), and to be run by run_cases().
///
/// Where the parts count their calls, a case in which there was none does not hold: property "calls_of_own_part". Cases that
/// compare the engine with itself, say in the order of its sums, ask of a communicator what Communicator promises.
[[nodiscard]] CaseList with_own_parts(CaseList cases, std::shared_ptr<const OwnParts> parts);

}  // namespace tandem
