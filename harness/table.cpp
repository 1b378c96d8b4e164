// SPDX-License-Identifier: Apache-2.0
#include "harness/table.h"

#include <cmath>
#include <numeric>

#include <fmt/format.h>

namespace tandem {
namespace {

std::string ratio_cell(const Verdict& verdict) {
  if (verdict.tensors.empty() && verdict.properties.empty()) return "-";
  if (std::isinf(verdict.error_over_bound)) return "differs";
  return verdict.criterion == Criterion::bitwise && verdict.error_over_bound == 0
             ? "equal bits"
             : fmt::format("{:.3g}", verdict.error_over_bound);
}

std::vector<std::string> row_of(const CaseResult& result) {
  std::vector<std::string> row = {result.name, std::string(name(result.verdict.status)), ratio_cell(result.verdict),
                                  result.verdict.worst_tensor.empty() ? "-" : result.verdict.worst_tensor};
  if (!result.measurements) {
    row.insert(row.end(), {"-", "-", "-"});
    return row;
  }
  const BytesByCategory& peak = result.measurements->peak_bytes;
  row.push_back(human_count(result.measurements->tokens_per_second));
  row.push_back(human_bytes(std::accumulate(peak.begin(), peak.end(), std::int64_t{0})));
  row.push_back(human_share(result.measurements->exposed_share));
  return row;
}

}  // namespace

std::string closing_line(const Counts& counts) {
  const std::string invalid = counts.invalid > 0 ? fmt::format(" ({} of them invalid)", counts.invalid) : "";
  return fmt::format("{} passed, {} failed{}, {} skipped", counts.passed, counts.failed + counts.invalid, invalid,
                     counts.skipped);
}

std::string render_table(const std::vector<CaseResult>& results, TableStyle style) {
  TextTable table({"case", "status", "error/bound", "worst tensor", "tokens/s", "peak memory", "exposed comm"});
  for (const CaseResult& result : results) table.add(row_of(result));
  std::string text = table.render(style);
  for (const CaseResult& result : results) {
    if (result.verdict.status == Status::pass) continue;
    text += fmt::format("{}: {}: {}\n", name(result.verdict.status), result.name, result.verdict.reason);
    if (result.localisation) text += fmt::format("  {}\n", describe(*result.localisation));
    if (!result.localisation_problem.empty()) text += fmt::format("  not localised: {}\n", result.localisation_problem);
  }
  return text + closing_line(count(results)) + "\n";
}

}  // namespace tandem
