// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/case.h"
#include "optimized/collectives/algorithms.h"

namespace tandem {

/// Parts of the suite; docs/techniques/collectives.md.
void add_collective_result_cases(CaseList& cases);  ///< every operation by every algorithm, against reference/collectives.h
void add_collective_bytes_cases(CaseList& cases);   ///< bytes on the wire
void add_collective_time_cases(CaseList& cases);    ///< on shaped links, against the closed forms

/// An operation to be timed; `bytes` of the whole tensor.
struct TimedCollective {
  CollectiveKind kind = CollectiveKind::all_reduce;
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::ring;
  std::int64_t bytes = 0;
};
/// Median over repetitions of the slowest rank's seconds, of each; they take turns over the link.
[[nodiscard]] std::vector<double> time_collectives(const LinkProfile& link, int ranks, int repetitions,
                                                   const std::vector<TimedCollective>& all);

/// "collectives/NAME" on so many ranks, judged by its properties.
[[nodiscard]] Case collectives_case(const std::string& name, const std::string& summary, int ranks);

/// Settings under which collectives are messages: between threads over a link that costs nothing, with two ranks a node, unless
/// the command line names another.
[[nodiscard]] WorldSettings message_settings(const RunContext& context, CollectiveAlgorithm algorithm);

}  // namespace tandem
