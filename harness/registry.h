// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "harness/case.h"

namespace tandem {

/// quick: the cases that are marked so; full: all.
enum class Tier : std::uint8_t { quick, full };

/// Throws ContractError where two cases share a name, a name does not begin with its suite and a slash, or a case cannot execute.
void check_registry(const CaseList& cases);

/// Suites in the order in which they first appear.
[[nodiscard]] std::vector<std::string> suite_names(const CaseList& cases);

/// The cases that any of the patterns selects, in the order of the list, each once. A pattern is a suite, a case, or the
/// beginning of case names: whole parts up to a slash if such cases exist ("data_parallel/ranks1" is not ranks16), else any
/// beginning. A `*` stands for any characters ("tensor_parallel/*/fp32"). No patterns: all cases.
///
/// Throws InputError where a pattern selects nothing (with the nearest suite or case), and where the tier leaves none of the
/// cases.
[[nodiscard]] CaseList select_cases(const CaseList& cases, std::span<const std::string> patterns, Tier tier);

/// True where one pattern selects the case of that name, judged by the name alone; for lists of cases in files.
[[nodiscard]] bool matches(const std::string& case_name, const std::string& pattern);

}  // namespace tandem
