// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "harness/report/report.h"

namespace tandem {

/// Charts from one result file, each with its caption; charts that have nothing to show are left out.
///   error over bound: a row for each suite, a mark for each case, the bound at 1
///   memory, and bytes on the wire: measured over predicted, by category
///   time split: per suite, the cases with the longest steps
[[nodiscard]] std::vector<ReportSection> result_sections(const ResultFile& file);

/// B against A: sentence and shares of the attribution, ratios of step times with their intervals, and what is not the same.
[[nodiscard]] ReportSection comparison_section(const ResultFile& a, const ResultFile& b, const std::string& name_a,
                                               const std::string& name_b);

/// The last step of the run in which the slowest rank takes longest: a row for each lane of a rank, a box for each stretch of one
/// activity. At most 16 ranks and about 2,000 boxes: shorter stretches are joined, and the caption says how short.
[[nodiscard]] Chart timeline_chart(const TraceGroup& group);
/// Of a trace with several runs those few whose steps take longest.
[[nodiscard]] ReportSection timeline_section(const std::vector<TraceGroup>& groups);

}  // namespace tandem
