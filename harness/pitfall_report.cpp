// SPDX-License-Identifier: Apache-2.0
#include "harness/pitfall_report.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "harness/glob.h"
#include "harness/registry.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

bool caught_it(const CaseResult& result) {
  return result.verdict.status == Status::fail || result.verdict.status == Status::invalid;
}

bool matches_any(const std::string& case_name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) { return matches(case_name, pattern); });
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

void note_catch(PitfallOutcome& outcome, const CaseResult& result) {
  outcome.case_name = result.name;
  outcome.status = result.verdict.status;
  outcome.check = result.verdict.check;
  outcome.reason = result.verdict.reason;
  outcome.first_bad_tensor = result.verdict.first_bad_tensor;
  outcome.first_bad_step = result.verdict.first_bad_step;
  outcome.starts_at = result.localisation ? std::optional(result.localisation->tensor) : std::nullopt;
}

// Why the predicted first bad tensor is not what was found; empty where it is, or where none is predicted.
std::string wrong_tensor(const PitfallOutcome& outcome) {
  const std::string& form = outcome.info.first_bad_tensor;
  if (form.empty()) return {};
  const auto fits = [&](const std::optional<std::string>& tensor) { return tensor && has_form(*tensor, form); };
  if (fits(outcome.first_bad_tensor) || fits(outcome.starts_at)) return {};
  std::string found = outcome.first_bad_tensor.value_or("");
  if (outcome.starts_at) found += fmt::format("{}{}", found.empty() ? "" : ", starting at ", *outcome.starts_at);
  return fmt::format("the first bad tensor should be {}, but {}", form, found.empty() ? "none was named" : "is " + found);
}

// Why a case that cannot reveal the pitfall did, or was not there to show that it cannot; empty where all is well.
std::string revealed(const PitfallInfo& info, const std::vector<CaseResult>& results) {
  for (const std::string& pattern : info.not_caught_by) {
    bool passed = false;
    for (const CaseResult& result : results) {
      if (!matches(result.name, pattern)) continue;
      if (caught_it(result)) {
        return fmt::format("{} should pass with it on, but: {}: {}", result.name, name(result.verdict.status),
                           result.verdict.reason);
      }
      passed = passed || result.verdict.status == Status::pass;
    }
    if (!passed) return fmt::format("'{}' should pass with it on, but no such case ran", pattern);
  }
  return {};
}

std::string predicted_cell(const PitfallOutcome& outcome) {
  if (!outcome.predicted) return "-";
  return *outcome.predicted ? "yes" : "no";
}

}  // namespace

PitfallSet PitfallInfo::switched_on() const {
  std::vector<Pitfall> on = with;
  on.push_back(pitfall);
  return PitfallSet(on);
}

std::vector<std::string> PitfallInfo::patterns() const {
  std::vector<std::string> all = caught_by;
  all.insert(all.end(), not_caught_by.begin(), not_caught_by.end());
  return all;
}

bool PitfallInfo::must_pass(const std::string& case_name) const { return matches_any(case_name, not_caught_by); }
bool PitfallInfo::must_catch(const std::string& case_name) const {
  return matches_any(case_name, caught_by) && !must_pass(case_name);
}

void check_catchers(const std::vector<PitfallInfo>& pitfalls, const CaseList& cases) {
  for (const PitfallInfo& info : pitfalls) {
    for (const std::string& pattern : info.patterns()) {
      if (std::ranges::any_of(cases, [&](const Case& entry) { return matches(entry.name, pattern); })) continue;
      const bool catches = std::ranges::count(info.caught_by, pattern) > 0;
      throw InputError(fmt::format("pitfall {} should {}be caught by '{}', but no case is called so", name(info.pitfall),
                                   catches ? "" : "not ", pattern));
    }
    for (const std::string& pattern : info.caught_by) {
      const auto catches = [&](const Case& entry) { return matches(entry.name, pattern) && info.must_catch(entry.name); };
      if (std::ranges::any_of(cases, catches)) continue;
      throw InputError(fmt::format("pitfall {} should be caught by '{}', but not_caught_by says that all these cases must pass",
                                   name(info.pitfall), pattern));
    }
  }
}

PitfallOutcome assess(const PitfallInfo& info, const std::vector<CaseResult>& results) {
  PitfallOutcome outcome;
  outcome.info = info;
  for (const CaseResult& result : results) {
    outcome.seconds += result.seconds;
    outcome.cases_run += result.verdict.status == Status::skip ? 0 : 1;
    if (!caught_it(result) || info.must_pass(result.name)) continue;
    ++outcome.cases_caught;
    const bool first_expected = info.must_catch(result.name) && !outcome.by_expected_case;
    if (outcome.caught && !first_expected) continue;
    outcome.caught = true;
    outcome.by_expected_case = outcome.by_expected_case || first_expected;
    note_catch(outcome, result);
  }
  if (info.first_bad_tensor.empty() && info.not_caught_by.empty()) return outcome;
  outcome.broken_prediction = wrong_tensor(outcome);
  if (outcome.broken_prediction.empty()) outcome.broken_prediction = revealed(info, results);
  outcome.predicted = outcome.broken_prediction.empty();
  return outcome;
}

bool all_caught(const std::vector<PitfallOutcome>& outcomes) { return std::ranges::all_of(outcomes, &PitfallOutcome::good); }

std::string mutation_score(const std::vector<PitfallOutcome>& outcomes) {
  const auto caught = std::ranges::count(outcomes, true, &PitfallOutcome::caught);
  const auto otherwise = caught - std::ranges::count(outcomes, true, &PitfallOutcome::good);
  return fmt::format("{} of {} caught{}", caught, outcomes.size(),
                     otherwise > 0 ? fmt::format(", {} of them not as predicted", otherwise) : "");
}

std::string render(const std::vector<PitfallOutcome>& outcomes, TableStyle style) {
  TextTable table({"pitfall", "class", "result", "check", "step", "first bad tensor", "case", "starts at", "predicted"});
  for (const PitfallOutcome& outcome : outcomes) {
    const std::string& fault_class = outcome.info.fault_class;
    table.add({title(outcome.info), fault_class.empty() ? "-" : fault_class, outcome.caught ? "caught" : "MISSED",
               outcome.caught ? outcome.check : "-", step_cell(outcome), outcome.first_bad_tensor.value_or("-"),
               outcome.caught ? outcome.case_name : "-", outcome.starts_at.value_or("-"), predicted_cell(outcome)});
  }
  std::string text = table.render(style);
  for (const PitfallOutcome& outcome : outcomes) {
    if (!outcome.caught) {
      text += fmt::format("missed: {}: {}. {}\n", title(outcome.info), why_missed(outcome), outcome.info.what);
    } else if (!outcome.by_expected_case) {
      text += fmt::format("note: {} was caught, but not by {}\n", title(outcome.info), fmt::join(outcome.info.caught_by, ", "));
    }
    if (!outcome.broken_prediction.empty()) {
      text += fmt::format("not as predicted: {}: {}\n", title(outcome.info), outcome.broken_prediction);
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
                    {"starts_at", outcome.starts_at ? Json(*outcome.starts_at) : Json(nullptr)},
                    {"predicted_tensor", text_or_null(outcome.info.first_bad_tensor)},
                    {"not_caught_by", outcome.info.not_caught_by},
                    {"predicted", outcome.predicted ? Json(*outcome.predicted) : Json(nullptr)},
                    {"broken_prediction", text_or_null(outcome.broken_prediction)},
                    {"seconds", outcome.seconds}});
  }
  const Json document = {{"schema_version", 1},
                         {"pitfalls", std::move(list)},
                         {"summary",
                          {{"caught", std::ranges::count(outcomes, true, &PitfallOutcome::caught)},
                           {"fully_caught", std::ranges::count(outcomes, true, &PitfallOutcome::good)},
                           {"total", outcomes.size()}}}};
  return document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tandem
