// SPDX-License-Identifier: Apache-2.0
#include "harness/pitfall_report.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "harness/registry.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

bool caught_it(const CaseResult& result) {
  return result.verdict.status == Status::fail || result.verdict.status == Status::invalid;
}

bool is_expected(const PitfallInfo& info, const CaseResult& result) {
  return std::ranges::any_of(info.caught_by, [&](const std::string& pattern) { return matches(result.name, pattern); });
}

std::string step_cell(const PitfallOutcome& outcome) {
  return outcome.first_bad_step < 0 ? "-" : fmt::to_string(outcome.first_bad_step);
}

std::string title(const PitfallInfo& info) {
  std::string text(name(info.pitfall));
  for (const Pitfall other : info.with) text += fmt::format(" + {}", name(other));
  return text;
}

std::string why_missed(const PitfallOutcome& outcome) {
  if (outcome.cases_run == 0) return "no case ran";
  return fmt::format("all {} cases passed", outcome.cases_run);
}

}  // namespace

PitfallSet PitfallInfo::switched_on() const {
  std::vector<Pitfall> on = with;
  on.push_back(pitfall);
  return PitfallSet(on);
}

void check_catchers(const std::vector<PitfallInfo>& pitfalls, const CaseList& cases) {
  for (const PitfallInfo& info : pitfalls) {
    for (const std::string& pattern : info.caught_by) {
      if (std::ranges::any_of(cases, [&](const Case& entry) { return matches(entry.name, pattern); })) continue;
      throw InputError(fmt::format("pitfall {} should be caught by '{}', but no case is called so", name(info.pitfall), pattern));
    }
  }
}

PitfallOutcome assess(const PitfallInfo& info, const std::vector<CaseResult>& results) {
  PitfallOutcome outcome;
  outcome.info = info;
  for (const CaseResult& result : results) {
    outcome.seconds += result.seconds;
    outcome.cases_run += result.verdict.status == Status::skip ? 0 : 1;
    if (!caught_it(result)) continue;
    ++outcome.cases_caught;
    const bool first_expected = is_expected(info, result) && !outcome.by_expected_case;
    if (outcome.caught && !first_expected) continue;
    outcome.caught = true;
    outcome.by_expected_case = outcome.by_expected_case || first_expected;
    outcome.case_name = result.name;
    outcome.status = result.verdict.status;
    outcome.check = result.verdict.check;
    outcome.reason = result.verdict.reason;
    outcome.first_bad_tensor = result.verdict.first_bad_tensor;
    outcome.first_bad_step = result.verdict.first_bad_step;
  }
  return outcome;
}

bool all_caught(const std::vector<PitfallOutcome>& outcomes) { return std::ranges::all_of(outcomes, &PitfallOutcome::caught); }

std::string mutation_score(const std::vector<PitfallOutcome>& outcomes) {
  return fmt::format("{} of {} caught", std::ranges::count(outcomes, true, &PitfallOutcome::caught), outcomes.size());
}

std::string render(const std::vector<PitfallOutcome>& outcomes, TableStyle style) {
  TextTable table({"pitfall", "class", "result", "check", "step", "first bad tensor", "case"});
  for (const PitfallOutcome& outcome : outcomes) {
    const std::string& fault_class = outcome.info.fault_class;
    table.add({title(outcome.info), fault_class.empty() ? "-" : fault_class, outcome.caught ? "caught" : "MISSED",
               outcome.caught ? outcome.check : "-", step_cell(outcome), outcome.first_bad_tensor.value_or("-"),
               outcome.caught ? outcome.case_name : "-"});
  }
  std::string text = table.render(style);
  for (const PitfallOutcome& outcome : outcomes) {
    if (!outcome.caught) {
      text += fmt::format("missed: {}: {}. {}\n", title(outcome.info), why_missed(outcome), outcome.info.what);
    } else if (!outcome.by_expected_case) {
      text += fmt::format("note: {} was caught, but not by {}\n", title(outcome.info), fmt::join(outcome.info.caught_by, ", "));
    }
  }
  return text + mutation_score(outcomes) + "\n";
}

std::string to_json(const std::vector<PitfallOutcome>& outcomes) {
  Json list = Json::array();
  for (const PitfallOutcome& outcome : outcomes) {
    Json with = Json::array();
    for (const Pitfall other : outcome.info.with) with.push_back(name(other));
    const auto if_caught = [&](const std::string& text) { return outcome.caught ? Json(text) : Json(nullptr); };
    list.push_back({{"pitfall", name(outcome.info.pitfall)},
                    {"with", std::move(with)},
                    {"technique", outcome.info.technique},
                    {"class", outcome.info.fault_class},
                    {"modelled_on", outcome.info.modelled_on},
                    {"caught", outcome.caught},
                    {"by_expected_case", outcome.by_expected_case},
                    {"cases_run", outcome.cases_run},
                    {"cases_caught", outcome.cases_caught},
                    {"case", if_caught(outcome.case_name)},
                    {"status", if_caught(std::string(name(outcome.status)))},
                    {"check", if_caught(outcome.check)},
                    {"reason", if_caught(outcome.reason)},
                    {"first_bad_step", outcome.first_bad_step < 0 ? Json(nullptr) : Json(outcome.first_bad_step)},
                    {"first_bad_tensor", outcome.first_bad_tensor ? Json(*outcome.first_bad_tensor) : Json(nullptr)},
                    {"seconds", outcome.seconds}});
  }
  const Json document = {
      {"schema_version", 1},
      {"pitfalls", std::move(list)},
      {"summary", {{"caught", std::ranges::count(outcomes, true, &PitfallOutcome::caught)}, {"total", outcomes.size()}}}};
  return document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tandem
