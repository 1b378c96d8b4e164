// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "harness/runner.h"

namespace tandem {

/// JUnit XML: one <testsuite> per suite, one <testcase> per case; fail is a <failure>, invalid an <error>, skip a <skipped>.
[[nodiscard]] std::string to_junit(const std::vector<CaseResult>& results);

/// Atomically. Throws IoError.
void write_junit(const std::filesystem::path& path, const std::vector<CaseResult>& results);

}  // namespace tandem
