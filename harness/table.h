// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "harness/runner.h"
#include "harness/text_table.h"

namespace tandem {

/// One row per case (status, error over bound, worst tensor, tokens/s, peak memory of the worst rank, exposed communication), the
/// reasons of all cases that did not pass, each followed by where the failure starts if that is known, and the closing line.
[[nodiscard]] std::string render_table(const std::vector<CaseResult>& results, TableStyle style);

/// "12 passed, 2 failed (1 of them invalid), 1 skipped": an invalid case counts as failed.
[[nodiscard]] std::string closing_line(const Counts& counts);

}  // namespace tandem
