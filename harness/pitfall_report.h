// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/pitfall.h"
#include "harness/runner.h"
#include "harness/text_table.h"

namespace tandem {

/// What suites/pitfalls.json says of one pitfall.
struct PitfallInfo {
  Pitfall pitfall = Pitfall::count_;
  std::string technique;               ///< "data_parallel", "metrics", "harness"
  std::string fault_class;             ///< "DP-01"; empty for one that is not of the catalogue. Key "class"
  std::string what;                    ///< what goes wrong, one sentence
  std::string modelled_on;             ///< public report, or how the mistake is known
  std::vector<std::string> caught_by;  ///< patterns of the cases that must catch it (harness/registry.h: matches)
  /// Predicted first bad tensor, of the verdict or of the localisation, as a form with `*` (harness/glob.h); empty: no
  /// prediction.
  std::string first_bad_tensor;
  /// Patterns of the cases that run with it switched on and must still pass: degenerate configurations which cannot reveal it.
  /// Where a case is selected by caught_by as well, this counts.
  std::vector<std::string> not_caught_by;
  std::vector<Pitfall> with;  ///< faults of a technique that a fault of the harness is planted together with

  /// The pitfall and those in `with`: what is switched on for it.
  [[nodiscard]] PitfallSet switched_on() const;
  /// caught_by and not_caught_by: the cases to run.
  [[nodiscard]] std::vector<std::string> patterns() const;
  [[nodiscard]] bool must_catch(const std::string& case_name) const;
  [[nodiscard]] bool must_pass(const std::string& case_name) const;
};

/// {"schema_version": 1, "pitfalls": [{"name", "technique", "class", "what", "modelled_on", "caught_by": [], "with": []}]},
/// each entry optionally with "first_bad_tensor" and "not_caught_by": [], in the order of the enumeration. Throws InputError,
/// naming source and entry, where it is no such document, a key is missing, unknown or of the wrong type, or the entries are not
/// exactly the pitfalls of core/pitfall.h, each once.
[[nodiscard]] std::vector<PitfallInfo> pitfalls_from_json(std::string_view text, std::string_view source_name);

/// Throws InputError where a pattern in `caught_by` or `not_caught_by` selects none of the cases, or one in `caught_by` only
/// cases that `not_caught_by` says must pass.
void check_catchers(const std::vector<PitfallInfo>& pitfalls, const CaseList& cases);

/// What became of a pitfall when the cases ran with it switched on.
struct PitfallOutcome {
  PitfallInfo info;
  bool caught = false;            ///< a case that need not pass failed or was invalid
  bool by_expected_case = false;  ///< one of `caught_by` did
  int cases_run = 0;              ///< skipped ones left out
  int cases_caught = 0;           ///< failed or invalid
  /// Of the first expected case that caught it, else of the first at all:
  std::string case_name;
  Status status = Status::pass;
  std::string check;
  std::string reason;
  std::optional<std::string> first_bad_tensor;
  int first_bad_step = -1;
  std::optional<std::string> starts_at;  ///< tensor of the localisation
  double seconds = 0;
  /// Whether the predictions of the description hold for that case and for those in not_caught_by; nothing predicted: empty.
  std::optional<bool> predicted;
  std::string broken_prediction;  ///< what does not hold, one line

  /// Caught, and as predicted where something was.
  [[nodiscard]] bool good() const noexcept { return caught && predicted.value_or(true); }
};
[[nodiscard]] PitfallOutcome assess(const PitfallInfo& info, const std::vector<CaseResult>& results);

/// "27 of 27 caught"; "26 of 27 caught, 2 of them not as predicted"
[[nodiscard]] std::string mutation_score(const std::vector<PitfallOutcome>& outcomes);
/// All are good().
[[nodiscard]] bool all_caught(const std::vector<PitfallOutcome>& outcomes);

/// Table of the outcomes (check, step, first bad tensor, case, where it starts, whether that was predicted), what was missed or
/// predicted wrongly and why, and the score.
[[nodiscard]] std::string render(const std::vector<PitfallOutcome>& outcomes, TableStyle style);
[[nodiscard]] std::string to_json(const std::vector<PitfallOutcome>& outcomes);

}  // namespace tandem
