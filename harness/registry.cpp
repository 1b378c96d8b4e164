// SPDX-License-Identifier: Apache-2.0
#include "harness/registry.h"

#include <algorithm>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/nearest_name.h"
#include "harness/glob.h"

namespace tandem {
namespace {

std::string without_trailing_slash(std::string pattern) {
  while (pattern.ends_with('/')) pattern.pop_back();
  return pattern;
}

[[noreturn]] void throw_unknown(const CaseList& cases, const std::string& pattern) {
  const std::vector<std::string> suites = suite_names(cases);
  std::vector<std::string> names = suites;
  for (const Case& entry : cases) names.push_back(entry.name);
  if (const std::optional<std::string> nearest = nearest_name(pattern, names)) {
    throw InputError(fmt::format("no suite or case is called '{}'; did you mean '{}'?", pattern, *nearest));
  }
  const std::string suite = pattern.substr(0, pattern.find('/'));
  if (std::ranges::count(suites, suite) > 0) {
    throw InputError(fmt::format("suite '{}' has no case '{}'; `tandem list` shows its cases", suite, pattern));
  }
  throw InputError(fmt::format("no suite or case is called '{}'; the suites are: {}", pattern, fmt::join(suites, ", ")));
}

// Indices of the cases that one pattern selects.
std::vector<std::size_t> selected_by(const CaseList& cases, const std::string& pattern) {
  std::vector<std::size_t> whole_parts;
  std::vector<std::size_t> beginnings;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (matches(cases[i].name, pattern)) whole_parts.push_back(i);
    if (cases[i].name.starts_with(pattern)) beginnings.push_back(i);
  }
  return whole_parts.empty() ? beginnings : whole_parts;
}

}  // namespace

bool matches(const std::string& case_name, const std::string& pattern) {
  const std::string wanted = without_trailing_slash(pattern);
  return !wanted.empty() && (has_form(case_name, wanted) || has_form(case_name, wanted + "/*"));
}

void check_registry(const CaseList& cases) {
  std::set<std::string> names;
  for (const Case& entry : cases) {
    TANDEM_CHECK(names.insert(entry.name).second, fmt::format("two cases are called {}", entry.name));
    TANDEM_CHECK(!entry.suite.empty() && entry.name.starts_with(entry.suite + "/"),
                 fmt::format("case {} does not begin with its suite '{}' and a slash", entry.name, entry.suite));
    TANDEM_CHECK(static_cast<bool>(entry.execute), fmt::format("case {} has nothing to execute", entry.name));
  }
}

std::vector<std::string> suite_names(const CaseList& cases) {
  std::vector<std::string> suites;
  for (const Case& entry : cases) {
    if (std::ranges::count(suites, entry.suite) == 0) suites.push_back(entry.suite);
  }
  return suites;
}

CaseList select_cases(const CaseList& cases, std::span<const std::string> patterns, Tier tier) {
  std::vector<bool> wanted(cases.size(), patterns.empty());
  for (const std::string& pattern : patterns) {
    const std::vector<std::size_t> selected = selected_by(cases, without_trailing_slash(pattern));
    if (selected.empty() || without_trailing_slash(pattern).empty()) throw_unknown(cases, pattern);
    for (const std::size_t index : selected) wanted[index] = true;
  }
  CaseList chosen;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (wanted[i] && (tier == Tier::full || cases[i].quick)) chosen.push_back(cases[i]);
  }
  if (chosen.empty()) {
    throw InputError(patterns.empty()
                         ? std::string("there is no case to run")
                         : fmt::format("none of the cases of {} is a quick one; use --full", fmt::join(patterns, ", ")));
  }
  return chosen;
}

}  // namespace tandem
