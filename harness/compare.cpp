// SPDX-License-Identifier: Apache-2.0
#include "harness/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/config_fields.h"
#include "core/error.h"

namespace tandem {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

MetricComparison not_comparable(const std::string& case_name, const std::string& metric, std::string reason) {
  return {case_name, metric, kNaN, kNaN, {kNaN, {kNaN, kNaN}}, Change::not_comparable, std::move(reason)};
}

// What makes two files as a whole not comparable; empty when nothing does.
std::string obstacle(const Environment& a, const Environment& b) {
  if (!a.pitfalls.empty()) return fmt::format("A was made with pitfalls on: {}", fmt::join(a.pitfalls, ", "));
  if (!b.pitfalls.empty()) return fmt::format("B was made with pitfalls on: {}", fmt::join(b.pitfalls, ", "));
  if (a.backend != b.backend) return fmt::format("other backend: {}, {}", a.backend, b.backend);
  if (a.link != b.link) return fmt::format("other link: {}, {}", a.link, b.link);
  if (a.adversary != b.adversary) return fmt::format("other adversary: {}, {}", a.adversary, b.adversary);
  return {};
}

// The first field of model or plan that differs: "plan.data differs".
std::string obstacle(const CaseResult& a, const CaseResult& b) {
  RunConfig of_a, of_b;
  of_a.model = a.model;
  of_a.plan = a.plan;
  of_b.model = b.model;
  of_b.plan = b.plan;
  for (const ConfigField& field : config_fields()) {
    if (field.get(of_a) != field.get(of_b)) return fmt::format("{} differs", field.full_name());
  }
  return {};
}

std::vector<std::string> differences(const Environment& a, const Environment& b) {
  std::vector<std::string> notes;
  const auto note = [&](const char* what, const std::string& of_a, const std::string& of_b) {
    if (of_a != of_b) notes.push_back(fmt::format("{}: A {}, B {}", what, of_a, of_b));
  };
  const auto commit = [](const Environment& run) { return run.git_commit + (run.git_dirty ? " with changes" : ""); };
  note("cpu", a.cpu, b.cpu);
  note("usable cores", fmt::to_string(a.usable_cores), fmt::to_string(b.usable_cores));
  note("transport", a.transport, b.transport);
  note("algorithm of collectives", a.algorithm, b.algorithm);
  note("build", a.build_type, b.build_type);
  note("compiler", a.compiler, b.compiler);
  note("commit", commit(a), commit(b));
  note("seed", fmt::to_string(a.seed), fmt::to_string(b.seed));
  return notes;
}

MetricComparison compare_steps(const std::string& case_name, const Summary& a, const Summary& b, double threshold) {
  const std::string metric = "step_seconds";
  MetricComparison row{case_name, metric, median(a.samples), median(b.samples), {1, {1, 1}}, Change::same, {}};
  // The same samples are one measurement, and there is nothing to tell apart.
  if (a.samples == b.samples) return row;
  const std::size_t fewest = std::min(a.samples.size(), b.samples.size());
  if (fewest < kFewestSamples) {
    return not_comparable(case_name, metric, fmt::format("{} samples; at least {} are needed", fewest, kFewestSamples));
  }
  row.ratio = ratio_of_medians(a.samples, b.samples);
  const double slower = 1 + threshold;
  const double faster = 1 / (1 + threshold);
  const ConfidenceInterval& interval = row.ratio.ci95;
  if (interval.low > slower) {
    row.change = Change::worse;
  } else if (interval.high < faster) {
    row.change = Change::better;
  } else if (!(interval.low >= faster && interval.high <= slower)) {
    row.change = Change::too_noisy;
    row.reason = fmt::format("the interval reaches across {:.3g}", interval.high > slower ? slower : faster);
  }
  return row;
}

MetricComparison compare_bytes(const std::string& case_name, const std::string& metric, std::int64_t a, std::int64_t b,
                               double threshold) {
  const auto of_a = static_cast<double>(a);
  const auto of_b = static_cast<double>(b);
  const double ratio = a == b ? 1 : of_b / of_a;
  MetricComparison row{case_name, metric, of_a, of_b, {ratio, {ratio, ratio}}, Change::same, {}};
  if (ratio > 1 + threshold) row.change = Change::worse;
  if (ratio < 1 / (1 + threshold)) row.change = Change::better;
  return row;
}

std::int64_t total(const BytesByCategory& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }

MetricComparison compare_verdicts(const CaseResult& a, const CaseResult& b) {
  const auto ratio = [](const Verdict& verdict) { return verdict.tensors.empty() ? kNaN : verdict.error_over_bound; };
  MetricComparison row{a.name, "verdict", ratio(a.verdict), ratio(b.verdict), {kNaN, {kNaN, kNaN}}, Change::same, {}};
  const bool passed_a = a.verdict.status == Status::pass;
  const bool passed_b = b.verdict.status == Status::pass;
  if (passed_a && passed_b) return row;
  row.reason = fmt::format("{} in A, {} in B", name(a.verdict.status), name(b.verdict.status));
  const bool skipped = a.verdict.status == Status::skip || b.verdict.status == Status::skip;
  row.change = skipped || passed_a == passed_b ? Change::not_comparable : passed_a ? Change::worse : Change::better;
  if (row.change == Change::worse) row.reason += ": " + b.verdict.reason;
  return row;
}

void compare_measurements(const CaseResult& a, const CaseResult& b, Comparison& comparison) {
  if (!a.measurements && !b.measurements) return;  // a case that measures nothing, such as a convergence check
  if (!a.measurements || !b.measurements) {
    comparison.rows.push_back(
        not_comparable(a.name, "step_seconds", fmt::format("{} has no measurements", a.measurements ? "B" : "A")));
    return;
  }
  const Measurements& of_a = *a.measurements;
  const Measurements& of_b = *b.measurements;
  const double threshold = comparison.threshold;
  comparison.rows.push_back(compare_steps(a.name, of_a.step_seconds, of_b.step_seconds, threshold));
  comparison.rows.push_back(compare_bytes(a.name, "peak_bytes", total(of_a.peak_bytes), total(of_b.peak_bytes), threshold));
  comparison.rows.push_back(compare_bytes(a.name, "bytes_on_wire", of_a.bytes_on_wire, of_b.bytes_on_wire, threshold));
}

void compare_case(const CaseResult& a, const CaseResult& b, const std::string& files_obstacle, Comparison& comparison) {
  if (a.verdict.status == Status::skip && b.verdict.status == Status::skip) return;
  const std::string reason = files_obstacle.empty() ? obstacle(a, b) : files_obstacle;
  if (!reason.empty()) {
    comparison.rows.push_back(not_comparable(a.name, "", reason));
    return;
  }
  comparison.rows.push_back(compare_verdicts(a, b));
  if (a.verdict.status == Status::pass && b.verdict.status == Status::pass) compare_measurements(a, b, comparison);
}

const CaseResult* find_case(const ResultFile& file, const std::string& name) {
  const auto found = std::ranges::find(file.cases, name, &CaseResult::name);
  return found == file.cases.end() ? nullptr : &*found;
}

}  // namespace

std::string MetricComparison::word() const {
  const bool time = metric == "step_seconds";
  const bool verdict = metric == "verdict";
  switch (change) {
    case Change::same: return "same";
    case Change::better: return time ? "faster" : verdict ? "fixed" : "less";
    case Change::worse: return time ? "slower" : verdict ? "broken" : "more";
    case Change::too_noisy: return "too noisy to tell";
    case Change::not_comparable: return "not comparable";
  }
  return "?";
}

int Comparison::count(Change change) const {
  return static_cast<int>(std::ranges::count(rows, change, &MetricComparison::change));
}

int Comparison::exit_status() const {
  if (count(Change::worse) > 0) return 1;
  const bool undecided = rows.empty() || count(Change::too_noisy) > 0 || count(Change::not_comparable) > 0;
  return undecided ? 3 : 0;
}

Comparison compare(const ResultFile& a, const ResultFile& b, std::string name_a, std::string name_b, double threshold) {
  if (!(threshold > 0 && threshold < 1))
    throw InputError(fmt::format("the threshold is {}; it must be between 0 and 100 %", threshold));
  Comparison comparison;
  comparison.name_a = std::move(name_a);
  comparison.name_b = std::move(name_b);
  comparison.threshold = threshold;
  comparison.notes = differences(a.environment, b.environment);
  const std::string files_obstacle = obstacle(a.environment, b.environment);
  for (const CaseResult& of_a : a.cases) {
    if (const CaseResult* of_b = find_case(b, of_a.name)) {
      compare_case(of_a, *of_b, files_obstacle, comparison);
    } else {
      comparison.rows.push_back(not_comparable(of_a.name, "", "the case is in A only"));
    }
  }
  for (const CaseResult& of_b : b.cases) {
    if (find_case(a, of_b.name) == nullptr) comparison.rows.push_back(not_comparable(of_b.name, "", "the case is in B only"));
  }
  return comparison;
}

}  // namespace tandem
