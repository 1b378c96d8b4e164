// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "harness/case.h"

namespace tandem {

/// Parts of the suite; docs/techniques/collectives.md.
void add_collective_result_cases(CaseList& cases);  ///< every operation by every algorithm, against reference/collectives.h
void add_collective_bytes_cases(CaseList& cases);   ///< bytes on the wire
void add_collective_time_cases(CaseList& cases);    ///< on shaped links, against the closed forms

/// "collectives/NAME" on so many ranks, judged by its properties.
[[nodiscard]] Case collectives_case(const std::string& name, const std::string& summary, int ranks);

/// Settings under which collectives are messages: between threads over a link that costs nothing, with two ranks a node, unless
/// the command line names another.
[[nodiscard]] WorldSettings message_settings(const RunContext& context, CollectiveAlgorithm algorithm);

}  // namespace tandem
