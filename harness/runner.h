// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "harness/case.h"
#include "harness/measurement.h"
#include "harness/other_load.h"
#include "harness/verdict.h"

namespace tandem {

/// What became of one case. Plain data: what tables, result files and reports are made from.
struct CaseResult {
  std::string suite;
  std::string name;
  GptConfig model;
  TrainingPlan plan;
  Verdict verdict;
  std::optional<Localisation> localisation;  ///< of a failed case whose Case::localise found where it starts
  std::string localisation_problem;          ///< why localise itself failed; empty where it did not
  /// Only where the verdict is `pass`: no number without a pass.
  std::optional<Measurements> measurements;
  double seconds = 0;  ///< the whole case, the judging too, both sides where neither was kept from before
  std::vector<std::vector<Span>> spans_by_rank;  ///< kept only where RunnerOptions::keep_spans
};

struct RunProgress {
  std::string name;       ///< case that is about to run; empty when all are done
  std::size_t index = 0;  ///< cases done so far
  std::size_t total = 0;
  double elapsed_seconds = 0;  ///< since the first case began
};

struct RunnerOptions {
  RunContext context;
  std::function<void(const RunProgress&)> on_progress;  ///< before each case and after the last; may be empty
  std::function<void(const CaseResult&)> on_result;     ///< after each case; may be empty
  /// What other processes that run the same cases make of it, before it is kept; what it throws ends the run. May be empty.
  std::function<void(CaseResult&)> agree;
  const std::atomic<bool>* interrupted = nullptr;  ///< borrowed; looked at between cases
  bool keep_spans = false;
  std::function<double()> cpu_seconds_of_others = &tandem::cpu_seconds_of_others;  ///< only tests have another
};

struct RunOutcome {
  std::vector<CaseResult> results;  ///< of the cases that ran, in order
  bool interrupted = false;         ///< stopped before the last case
};

/// Cores that other programs may take on average while a case measures time: half of what a single noisy neighbour would.
inline constexpr double kBusyCores = 0.1;

/// Runs one case: skips it with the reason where it is unavailable, executes, judges and measures it. An exception of the case is
/// a `fail` with its text (check "exception"); a measurement beyond physics is `invalid` (check "measurement"). A `fail` is
/// localised where the case can. A timed case (Case::timed) whose property does not hold while other programs took more than
/// kBusyCores of the machine is a `skip` that says so, unless a pitfall is planted: neither a pass nor a fault of the code.
[[nodiscard]] CaseResult run_case(const Case& entry, const RunnerOptions& options);

/// Runs the cases in order. No case stops another; the interruption flag stops between cases and keeps what was done.
[[nodiscard]] RunOutcome run_cases(const CaseList& cases, const RunnerOptions& options);

struct Counts {  ///< of cases
  int passed = 0, failed = 0, skipped = 0, invalid = 0;
  [[nodiscard]] bool good() const noexcept { return failed == 0 && invalid == 0; }
};
[[nodiscard]] Counts count(const std::vector<CaseResult>& results);

}  // namespace tandem
