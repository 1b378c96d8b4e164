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
  return {case_name, metric, kNaN, kNaN, {kNaN, {kNaN, kNaN}}, Change::not_comparable, std::move(reason), 0.95, kNaN};
}

// What makes two files as a whole not comparable; empty when nothing does.
std::string obstacle(const Environment& a, const Environment& b, bool machines) {
  if (!a.pitfalls.empty()) return fmt::format("A was made with pitfalls on: {}", fmt::join(a.pitfalls, ", "));
  if (!b.pitfalls.empty()) return fmt::format("B was made with pitfalls on: {}", fmt::join(b.pitfalls, ", "));
  if (!machines && a.backend != b.backend) {
    return fmt::format("other backend: {}, {} (--machines compares all the same)", a.backend, b.backend);
  }
  if (!machines && a.link != b.link) return fmt::format("other link: {}, {} (--machines compares all the same)", a.link, b.link);
  if (a.adversary != b.adversary) return fmt::format("other adversary: {}, {}", a.adversary, b.adversary);
  return {};
}

// The first field of model or plan that differs: "plan.data differs".
std::string obstacle(const CaseResult& a, const CaseResult& b, bool machines) {
  if (machines && same_work(a, b)) return {};
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
  note("instructions", a.instruction_set, b.instruction_set);
  note("gpus", fmt::format("{}", fmt::join(a.gpus, ", ")), fmt::format("{}", fmt::join(b.gpus, ", ")));
  note("memory", human_bytes(a.memory_bytes), human_bytes(b.memory_bytes));
  note("backend", a.backend, b.backend);
  note("link", a.link, b.link);
  note("ranks", fmt::to_string(a.ranks), fmt::to_string(b.ranks));
  note("threads per rank", fmt::to_string(a.threads_per_rank), fmt::to_string(b.threads_per_rank));
  note("usable cores", fmt::to_string(a.usable_cores), fmt::to_string(b.usable_cores));
  note("transport", a.transport, b.transport);
  note("algorithm of collectives", a.algorithm, b.algorithm);
  note("version", a.version, b.version);
  note("build", a.build_type, b.build_type);
  note("compiler", a.compiler, b.compiler);
  note("commit", commit(a), commit(b));
  note("seed", fmt::to_string(a.seed), fmt::to_string(b.seed));
  return notes;
}

MetricComparison compare_bytes(const std::string& case_name, const std::string& metric, std::int64_t a, std::int64_t b,
                               double threshold) {
  const auto of_a = static_cast<double>(a);
  const auto of_b = static_cast<double>(b);
  const double ratio = a == b ? 1 : of_b / of_a;
  MetricComparison row{case_name, metric, of_a, of_b, {ratio, {ratio, ratio}}, Change::same, {}, 1, kNaN};
  if (ratio > 1 + threshold) row.change = Change::worse;
  if (ratio < 1 / (1 + threshold)) row.change = Change::better;
  return row;
}

std::int64_t total(const BytesByCategory& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }

MetricComparison compare_verdicts(const CaseResult& a, const CaseResult& b) {
  const auto ratio = [](const Verdict& verdict) { return verdict.tensors.empty() ? kNaN : verdict.error_over_bound; };
  MetricComparison row{a.name, "verdict", ratio(a.verdict), ratio(b.verdict), {kNaN, {kNaN, kNaN}}, Change::same, {}, 1, kNaN};
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
  comparison.rows.push_back(
      compare_times(a.name, "step_seconds", of_a.step_seconds.samples, of_b.step_seconds.samples, 1, 1, threshold));
  comparison.rows.push_back(compare_bytes(a.name, "peak_bytes", total(of_a.peak_bytes), total(of_b.peak_bytes), threshold));
  comparison.rows.push_back(compare_bytes(a.name, "bytes_on_wire", of_a.bytes_on_wire, of_b.bytes_on_wire, threshold));
}

// Errors against the truth, stage by stage: equal to the last digit, they come from the same bits.
void compare_numbers(const CaseResult& a, const CaseResult& b, Comparison& comparison) {
  const std::vector<TensorVerdict>&of_a = a.verdict.tensors, &of_b = b.verdict.tensors;
  if (of_a.empty() || of_b.empty()) return;
  comparison.numbers_compared += 1;
  for (const TensorVerdict& tensor : of_a) {
    const auto same = std::ranges::find_if(of_b, [&](const TensorVerdict& other) {
      return other.stage == tensor.stage && other.step == tensor.step && other.tensor == tensor.tensor;
    });
    if (same != of_b.end() && same->error == tensor.error) continue;
    if (comparison.first_other_numbers.empty()) {
      const std::string other = same == of_b.end() ? "another tensor is the worst" : fmt::format("{:.4g} in B", same->error);
      comparison.first_other_numbers =
          fmt::format("{}: error of {} in {} is {:.4g} in A, {}", a.name, tensor.tensor, tensor.stage, tensor.error, other);
    }
    return;
  }
  comparison.numbers_identical += of_a.size() == of_b.size() ? 1 : 0;
}

bool passed(const CaseResult& result) { return result.verdict.status == Status::pass; }

void compare_case(const CaseResult& a, const CaseResult& b, const std::string& files_obstacle, bool machines,
                  Comparison& comparison) {
  if (a.verdict.status == Status::skip && b.verdict.status == Status::skip) return;
  const std::string reason = files_obstacle.empty() ? obstacle(a, b, machines) : files_obstacle;
  if (!reason.empty()) {
    comparison.rows.push_back(not_comparable(a.name, "", reason));
    return;
  }
  comparison.rows.push_back(compare_verdicts(a, b));
  if (!passed(a) || !passed(b)) return;
  compare_numbers(a, b, comparison);
  compare_measurements(a, b, comparison);
}

const CaseResult* find_case(const ResultFile& file, const std::string& name) {
  const auto found = std::ranges::find(file.cases, name, &CaseResult::name);
  return found == file.cases.end() ? nullptr : &*found;
}

// "data_parallel/ranks2/fp32" -> "data_parallel/ranks*/fp32"; a name without a number of ranks stays.
std::string without_ranks(const std::string& name) {
  const std::size_t at = name.find("/ranks");
  if (at == std::string::npos) return name;
  const std::size_t digits = at + 6, end = name.find_first_not_of("0123456789", digits);
  return name.substr(0, digits) + "*" + (end == std::string::npos ? "" : name.substr(end));
}

// The only case of `other` that has no twin in `own`, was measured, and differs from `result` in its number of ranks.
const CaseResult* find_other_ranks(const CaseResult& result, const ResultFile& own, const ResultFile& other) {
  const std::string name = without_ranks(result.name);
  if (name == result.name) return nullptr;
  const CaseResult* found = nullptr;
  for (const CaseResult& candidate : other.cases) {
    if (without_ranks(candidate.name) != name || find_case(own, candidate.name) != nullptr) continue;
    if (found != nullptr) return nullptr;
    found = &candidate;
  }
  return found;
}

void compare_ranks(const CaseResult& a, const CaseResult& b, const std::string& files_obstacle, Comparison& comparison) {
  const int ranks_a = a.plan.parallel.world_size(), ranks_b = b.plan.parallel.world_size();
  const std::string name = fmt::format("{} ({} and {} ranks)", without_ranks(a.name), ranks_a, ranks_b);
  const std::string metric = "seconds_per_token_and_rank";
  std::string reason = files_obstacle;
  if (reason.empty() && a.model != b.model) reason = "other ranks and another model: no unit of work in common";
  if (reason.empty() && (!passed(a) || !passed(b) || !a.measurements || !b.measurements)) reason = "not measured in both files";
  const auto tokens = [](const CaseResult& result) {
    return result.measurements->tokens_per_second * result.measurements->step_seconds.median;
  };
  if (reason.empty() && !(tokens(a) > 0 && tokens(b) > 0)) reason = "other ranks and no tokens: no unit of work in common";
  if (!reason.empty()) {
    comparison.rows.push_back(not_comparable(name, metric, reason));
    return;
  }
  MetricComparison row = compare_times(name, metric, a.measurements->step_seconds.samples, b.measurements->step_seconds.samples,
                                       ranks_a / tokens(a), ranks_b / tokens(b), comparison.threshold);
  const std::string scaling = fmt::format("efficiency of B against A {:.3f}; rows of a step {} and {}", 1 / row.ratio.value,
                                          a.plan.batch.rows, b.plan.batch.rows);
  row.reason = row.reason.empty() ? scaling : fmt::format("{}; {}", scaling, row.reason);
  comparison.rows.push_back(std::move(row));
}

void compare_single(const ResultFile& a, const ResultFile& b, const std::string& files_obstacle, Comparison& comparison) {
  for (const CaseResult& of_a : a.cases) {
    if (find_case(b, of_a.name) != nullptr) continue;
    const CaseResult* const of_b = find_other_ranks(of_a, a, b);
    if (of_b != nullptr && find_other_ranks(*of_b, b, a) == &of_a) {
      compare_ranks(of_a, *of_b, files_obstacle, comparison);
    } else {
      comparison.rows.push_back(not_comparable(of_a.name, "", "the case is in A only"));
    }
  }
  for (const CaseResult& of_b : b.cases) {
    if (find_case(a, of_b.name) != nullptr) continue;
    const CaseResult* const of_a = find_other_ranks(of_b, b, a);
    if (of_a != nullptr && find_other_ranks(*of_a, a, b) == &of_b) continue;
    comparison.rows.push_back(not_comparable(of_b.name, "", "the case is in B only"));
  }
}

// Cases of few samples are decided together; where there are too few of them for that, each is undecided.
void compare_together(Comparison& comparison) {
  const auto is_left = [](const MetricComparison& row) { return row.change == Change::few_samples; };
  if (std::ranges::none_of(comparison.rows, is_left)) return;
  const MetricComparison all = compare_all_times(comparison.rows, comparison.threshold);
  if (std::isfinite(all.ratio.value)) {
    comparison.rows.push_back(all);
    return;
  }
  for (MetricComparison& row : comparison.rows) {
    if (row.change == Change::few_samples) row.change = Change::too_noisy;
  }
}

}  // namespace

std::string MetricComparison::word() const {
  const bool time = metric == "step_seconds" || metric == "seconds_per_token_and_rank";
  const bool verdict = metric == "verdict";
  switch (change) {
    case Change::same: return "same";
    case Change::better: return time ? "faster" : verdict ? "fixed" : "less";
    case Change::worse: return time ? "slower" : verdict ? "broken" : "more";
    case Change::too_noisy: return "too noisy to tell";
    case Change::not_comparable: return "not comparable";
    case Change::few_samples: return "see all cases";
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

Comparison compare(const ResultFile& a, const ResultFile& b, std::string name_a, std::string name_b,
                   const CompareOptions& options) {
  if (!(options.threshold > 0 && options.threshold < 1))
    throw InputError(fmt::format("the threshold is {}; it must be between 0 and 100 %", options.threshold));
  Comparison comparison;
  comparison.name_a = std::move(name_a);
  comparison.name_b = std::move(name_b);
  comparison.threshold = options.threshold;
  comparison.notes = differences(a.environment, b.environment);
  const std::string files_obstacle = obstacle(a.environment, b.environment, options.machines);
  for (const CaseResult& of_a : a.cases) {
    const CaseResult* const of_b = find_case(b, of_a.name);
    if (of_b != nullptr) compare_case(of_a, *of_b, files_obstacle, options.machines, comparison);
  }
  compare_single(a, b, files_obstacle, comparison);
  compare_together(comparison);
  // Two links or backends are a gap to explain; a pitfall or an adversary is none.
  if (obstacle(a.environment, b.environment, true).empty()) comparison.attribution = attribute_gap(a, b);
  return comparison;
}

Comparison compare(const ResultFile& a, const ResultFile& b, std::string name_a, std::string name_b, double threshold) {
  return compare(a, b, std::move(name_a), std::move(name_b), CompareOptions{.threshold = threshold});
}

int exit_status(const std::vector<Comparison>& comparisons) {
  int status = comparisons.empty() ? 3 : 0;
  for (const Comparison& comparison : comparisons) {
    const int own = comparison.exit_status();
    if (own == 1) return 1;
    status = std::max(status, own);
  }
  return status;
}

}  // namespace tandem
