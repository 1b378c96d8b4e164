// SPDX-License-Identifier: Apache-2.0
// Predicted against published: step times, their order, memory. docs/techniques/scaling.md has the errors of every source.
#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "optimized/scaling/published.h"
#include "suites/properties.h"
#include "suites/scaling_cases.h"

namespace tandem {
namespace {

std::vector<PublishedRow> gated_rows() {
  std::vector<PublishedRow> rows = published_rows("all");
  std::erase_if(rows, [](const PublishedRow& row) { return !is_gated(row); });
  return rows;
}

const ErrorSummary& all_of(const std::vector<ErrorSummary>& summaries) {
  return *std::find_if(summaries.begin(), summaries.end(), [](const ErrorSummary& summary) { return summary.name == "all"; });
}

std::vector<Property> step_times(const RunContext& /*context*/) {
  const std::vector<PublishedRow> rows = gated_rows();
  const std::vector<ErrorSummary> summaries = summarize(predict(rows));
  const ErrorSummary& all = all_of(summaries);
  std::vector<Property> properties = {
      {"median_absolute_error", all.median_absolute, Relation::at_most, 0.08,
       fmt::format("of {} complete rows, mean signed error {:+.3f}, worst {:.3f}", all.rows, all.mean_signed, all.worst_absolute),
       -1, ""},
      {"p90_absolute_error", all.p90_absolute, Relation::at_most, 0.2, "nine rows in ten", -1, ""},
      {"rows", static_cast<double>(all.rows), Relation::at_least, 40, "enough to say something", -1, ""},
      exactly("rows_refused", all.refused, 0, "what was run is simulated")};
  for (const ErrorSummary& set : summaries) {
    if (set.name == "all" || set.rows == 0) continue;
    properties.push_back(
        {"median_absolute_error of " + set.name, set.median_absolute, Relation::at_most, 0.08,
         fmt::format("{} rows, 90th percentile {:.3f}, worst {:.3f}, mean signed {:+.3f}: no source is left to chance", set.rows,
                     set.p90_absolute, set.worst_absolute, set.mean_signed),
         -1, ""});
  }
  return properties;
}

std::vector<Property> order(const RunContext& /*context*/) {
  const std::vector<PublishedRow> rows = gated_rows();
  const std::vector<ErrorSummary> summaries = summarize(predict(rows));
  const ErrorSummary& all = all_of(summaries);
  return {{"kendall_tau", all.kendall_tau, Relation::at_least, 0.8,
           fmt::format("of step seconds over {} tables of four and more rows, weighted by pairs", all.tables), -1, ""},
          {"kendall_tau_throughput", all.kendall_tau_throughput, Relation::at_least, 0.5,
           "of model FLOP/s of a device, which sizes do not order: half of what a perfect order has", -1, ""}};
}

// Of what the same layout keeps without recomputation and with whole rows on every tensor rank.
double activation_share(const PublishedRow& row, const PitfallSet& pitfalls) {
  const ClusterSpec cluster = cluster_of(row);
  Workload whole = row.workload;
  whole.plan.recompute = {};
  whole.plan.sequence_parallel = false;
  return estimate_memory(row.workload, cluster, pitfalls).activations / estimate_memory(whole, cluster, pitfalls).activations;
}

std::vector<Property> memory(const RunContext& context) {
  std::vector<Property> properties;
  for (const PublishedRow& row : published_memory_rows("all")) {
    if (row.suspect || row.from_memory || !conflicts(row.workload).empty()) continue;
    const MemoryEstimate estimate = estimate_memory(row.workload, cluster_of(row), context.pitfalls);
    const auto compare = [&](const std::string& what, double value, double published, double limit, const std::string& why) {
      properties.push_back(relative_error(what + " of " + row.id, value, published, limit, row.source + why));
    };
    // A chart is not read to 1 %.
    if (row.model_state_bytes && !row.approximate) {
      compare("model_state", estimate.model_state(), *row.model_state_bytes,
              std::max(0.01, row.model_state_rounding / *row.model_state_bytes), "; 1 %, or half a unit of the last digit");
    }
    if (row.activation_bytes) compare("activations", estimate.activations, *row.activation_bytes, 0.1, "; 10 %");
    if (row.activation_share) {
      compare("activation_share", activation_share(row, context.pitfalls), *row.activation_share, 0.1, "; 10 %");
    }
  }
  const auto figures = static_cast<double>(properties.size());
  properties.push_back({"figures", figures, Relation::at_least, 10, "enough to say something", -1, ""});
  return properties;
}

std::vector<Property> verdicts(const RunContext& context) {
  std::vector<Property> properties;
  std::map<bool, int> count, wrong;
  std::map<bool, std::string> names;
  const auto judge = [&](const PublishedRow& row) {
    const bool usable = row.complete && !row.suspect && !row.from_memory && !row.analytic;
    if (!usable || !conflicts(row.workload).empty()) return;
    const bool ran = !row.out_of_memory;
    const MemoryEstimate estimate = estimate_memory(row.workload, cluster_of(row), context.pitfalls);
    ++count[ran];
    if (estimate.fits() == ran) return;
    ++wrong[ran];
    names[ran] += fmt::format(" {} ({:.1f} of {:.1f} GB)", row.id, estimate.total() / 1e9, estimate.limit / 1e9);
  };
  for (const PublishedRow& row : published_rows("all")) judge(row);
  for (const PublishedRow& row : published_memory_rows("all")) {
    if (row.out_of_memory) judge(row);
  }
  for (const bool ran : {true, false}) {
    // What a run needs beside its tensors (fragments, other processes) decides near the limit, and nobody publishes it: few runs
    // that failed are on record.
    properties.push_back({ran ? "ran_but_said_not_to_fit" : "out_of_memory_but_said_to_fit",
                          static_cast<double>(wrong[ran]) / std::max(count[ran], 1), Relation::at_most, ran ? 0.05 : 0.5,
                          fmt::format("{} of {} rows:{}", wrong[ran], count[ran], names[ran].empty() ? " none" : names[ran]), -1,
                          ""});
  }
  return properties;
}

}  // namespace

void add_scaling_published_cases(CaseList& cases) {
  cases.push_back(scaling_case("published/step-time", "predicted against published step times", step_times));
  cases.push_back(scaling_case("published/order", "configurations of one table come out in the order of the table", order));
  cases.push_back(scaling_case("published/memory", "predicted against published model state and activations", memory));
  cases.push_back(scaling_case("published/verdicts", "what is published as run fits, what ran out of memory does not", verdicts));
}

}  // namespace tandem
