// SPDX-License-Identifier: Apache-2.0
#include "harness/runner.h"

#include <chrono>
#include <exception>
#include <utility>

#include <fmt/format.h>

namespace tandem {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void decide(Verdict& verdict, Status status, std::string check, std::string reason) {
  verdict.status = status;
  verdict.check = std::move(check);
  verdict.reason = std::move(reason);
}

// "std::bad_alloc" and the like say little, but more than nothing.
std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  return text.empty() ? "an exception without a text" : text;
}

void measure(CaseResult& result, const Measured& measured, const PitfallSet& pitfalls) {
  try {
    Measurements measurements = derive(measured, pitfalls);
    if (result.verdict.status == Status::pass) result.measurements = std::move(measurements);
  } catch (const std::exception& error) {
    if (result.verdict.status == Status::pass) decide(result.verdict, Status::invalid, "measurement", text_of(error));
  }
}

void execute(const Case& entry, const RunnerOptions& options, CaseResult& result) {
  if (entry.unavailable) {
    if (const std::optional<std::string> reason = entry.unavailable(options.context)) {
      decide(result.verdict, Status::skip, "unavailable", *reason);
      return;
    }
  }
  CaseEvidence evidence = entry.execute(options.context);
  result.verdict = judge(entry.criterion, evidence, options.context.pitfalls);
  if (!evidence.measured) return;
  measure(result, *evidence.measured, options.context.pitfalls);
  if (options.keep_spans) result.spans_by_rank = std::move(evidence.measured->spans_by_rank);
}

// A verdict stands whatever becomes of the search for its cause.
void localise(const Case& entry, const RunContext& context, CaseResult& result) {
  if (result.verdict.status != Status::fail || !entry.localise) return;
  try {
    result.localisation = entry.localise(context);
  } catch (const std::exception& error) {
    result.localisation_problem = text_of(error);
  } catch (...) {
    result.localisation_problem = "it threw something that is no std::exception";
  }
}

// Of a timed case, only what its properties say depends on what else runs; gradients do not.
void excuse_if_busy(CaseResult& result, double other_cores) {
  Verdict& verdict = result.verdict;
  if (verdict.status != Status::fail || !verdict.check.starts_with("property ") || other_cores <= kBusyCores) return;
  decide(verdict, Status::skip, "busy machine",
         fmt::format("the machine is busy: other programs took {:.2f} cores while it was timed ({}: {})", other_cores,
                     verdict.check, verdict.reason));
}

}  // namespace

CaseResult run_case(const Case& entry, const RunnerOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  CaseResult result;
  result.suite = entry.suite;
  result.name = entry.name;
  result.model = entry.model;
  result.plan = entry.plan;
  result.verdict.criterion = entry.criterion;
  const double others_before = entry.timed ? options.cpu_seconds_of_others() : 0;
  try {
    execute(entry, options, result);
  } catch (const std::exception& error) {
    decide(result.verdict, Status::fail, "exception", text_of(error));
  } catch (...) {
    decide(result.verdict, Status::fail, "exception", "the case threw something that is no std::exception");
  }
  // Ranks of other processes are no other programs; a planted fault must be caught.
  if (entry.timed && options.context.world.transport == "threads" && !options.context.pitfalls.any()) {
    excuse_if_busy(result, (options.cpu_seconds_of_others() - others_before) / seconds_since(start));
  }
  localise(entry, options.context, result);
  result.seconds = seconds_since(start);
  return result;
}

RunOutcome run_cases(const CaseList& cases, const RunnerOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto report = [&](const std::string& name, std::size_t index) {
    if (options.on_progress) options.on_progress({name, index, cases.size(), seconds_since(start)});
  };
  RunOutcome outcome;
  for (const Case& entry : cases) {
    if (options.interrupted != nullptr && options.interrupted->load()) {
      outcome.interrupted = true;
      break;
    }
    report(entry.name, outcome.results.size());
    CaseResult result = run_case(entry, options);
    if (options.agree) options.agree(result);
    outcome.results.push_back(std::move(result));
    if (options.on_result) options.on_result(outcome.results.back());
  }
  report("", outcome.results.size());
  return outcome;
}

Counts count(const std::vector<CaseResult>& results) {
  Counts counts;
  for (const CaseResult& result : results) {
    switch (result.verdict.status) {
      case Status::pass: ++counts.passed; break;
      case Status::fail: ++counts.failed; break;
      case Status::skip: ++counts.skipped; break;
      case Status::invalid: ++counts.invalid; break;
    }
  }
  return counts;
}

}  // namespace tandem
