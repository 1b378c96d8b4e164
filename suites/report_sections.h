// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "harness/report/report.h"

namespace tandem {

/// Sweeps that single cases hold as properties, as charts for the report: step time over bucket size (overlap/bucket-size/...),
/// and what a code saves over the bandwidth of the link (compression/CODEC/pays/...). Nothing of cases that did not pass.
[[nodiscard]] std::vector<ReportSection> sweep_sections(const ResultFile& file);

}  // namespace tandem
