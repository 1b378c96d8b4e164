// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "harness/report/result_charts.h"
#include "harness/text_table.h"

namespace tandem {
namespace {

constexpr std::size_t kMostBars = 40, kMostRows = 500;

Chart ratio_chart(const Comparison& comparison) {
  std::vector<const MetricComparison*> rows;
  for (const MetricComparison& row : comparison.rows) {
    if (row.metric == "step_seconds" && std::isfinite(row.ratio.value) && row.ratio.value > 0) rows.push_back(&row);
  }
  const std::size_t all = rows.size();
  std::stable_sort(rows.begin(), rows.end(), [](const auto* a, const auto* b) {
    return std::abs(std::log(a->ratio.value)) > std::abs(std::log(b->ratio.value));
  });
  rows.resize(std::min(all, kMostBars));
  ChartSeries ratios{.name = "B / A with its 95 % interval", .points = true};
  Chart chart{
      .id = "ratio_of_step_times",
      .title = "Step time of B over that of A",
      .caption = fmt::format("Right of 1, B is slower. {} of {} timed cases, the largest ratios first.", rows.size(), all),
      .x_label = "ratio of medians",
      .log_x = true};
  for (const MetricComparison* row : rows) {
    ratios.x.push_back(row->ratio.value);
    ratios.y.push_back(static_cast<double>(chart.rows.size()));
    ratios.low.push_back(row->ratio.ci95.low);
    ratios.high.push_back(row->ratio.ci95.high);
    chart.rows.push_back(row->case_name);
  }
  if (rows.empty()) return chart;
  chart.series = {std::move(ratios), {.name = "equal", .x = {1, 1}, .y = {-0.5, static_cast<double>(chart.rows.size()) - 0.5}}};
  return chart;
}

// Bars from nothing to what B takes longer.
Chart cause_chart(const Attribution& attribution) {
  Chart chart{.id = "attribution",
              .title = "To what the gap belongs",
              .caption =
                  "Time of a step that B takes longer (right) or less (left), over all cases that passed in both and have the "
                  "split of their time.",
              .x_label = "ms of a step, B - A",
              .series = {{.name = "", .spans = true}}};
  ChartSeries& bars = chart.series.front();
  for (const CauseShare& cause : attribution.causes) {
    bars.y.push_back(static_cast<double>(chart.rows.size()));
    bars.low.push_back(std::min(0.0, 1e3 * cause.seconds));
    bars.high.push_back(std::max(0.0, 1e3 * cause.seconds));
    chart.rows.push_back(fmt::format("{} {}", name(cause.cause), human_share(std::abs(cause.share) < 5e-4 ? 0 : cause.share)));
  }
  return chart;
}

std::string value_cell(const MetricComparison& row, double value) {
  if (!std::isfinite(value)) return "-";
  if (row.metric.starts_with("seconds") || row.metric == "step_seconds") return human_seconds(value);
  return row.metric == "verdict" ? fmt::format("{:.3g}", value) : human_bytes(static_cast<std::int64_t>(value));
}

std::string ratio_cell(const MetricComparison& row) {
  if (!std::isfinite(row.ratio.value)) return "-";
  const auto& [low, high] = row.ratio.ci95;
  return low == high ? fmt::format("{:.3f}", row.ratio.value)
                     : fmt::format("{:.3f} ({:.3f} to {:.3f})", row.ratio.value, low, high);
}

std::string summary_of(const Comparison& comparison) {
  std::string text = comparison.attribution.sentence + ".";
  for (const std::string& note : comparison.notes) text += fmt::format(" Differs in {}.", note);
  if (comparison.numbers_compared > 0) {
    text += fmt::format(" Numbers: {} of {} cases have the same errors to the last digit.", comparison.numbers_identical,
                        comparison.numbers_compared);
  }
  return text + fmt::format(
                    " Of all metrics {} are the same within {:.3g} %, {} better, {} worse, {} too noisy to tell, {} not "
                    "comparable; those that are not the same:",
                    comparison.count(Change::same), 100 * comparison.threshold, comparison.count(Change::better),
                    comparison.count(Change::worse), comparison.count(Change::too_noisy),
                    comparison.count(Change::not_comparable));
}

}  // namespace

ReportSection comparison_section(const ResultFile& a, const ResultFile& b, const std::string& name_a, const std::string& name_b) {
  const Comparison comparison = compare(a, b, name_a, name_b, CompareOptions{.machines = true});
  ReportSection section{.title = fmt::format("{} (B) against {} (A)", name_b, name_a), .text = summary_of(comparison)};
  if (!comparison.attribution.causes.empty()) section.charts.push_back(cause_chart(comparison.attribution));
  if (Chart chart = ratio_chart(comparison); !chart.series.empty()) section.charts.push_back(std::move(chart));
  section.table.push_back({"case", "metric", "A", "B", "B / A", "result", "why"});
  for (const Change change : {Change::worse, Change::better, Change::too_noisy}) {
    for (const MetricComparison& row : comparison.rows) {
      if (row.change != change || section.table.size() > kMostRows) continue;
      section.table.push_back(
          {row.case_name, row.metric, value_cell(row, row.a), value_cell(row, row.b), ratio_cell(row), row.word(), row.reason});
    }
  }
  // Many cases share a reason, such as that the other file does not have them.
  std::map<std::string, std::vector<const MetricComparison*>> by_reason;
  for (const MetricComparison& row : comparison.rows) {
    if (row.change == Change::not_comparable) by_reason[row.reason].push_back(&row);
  }
  for (const auto& [reason, rows] : by_reason) {
    const std::string others = rows.size() > 1 ? fmt::format(" and {} more", rows.size() - 1) : "";
    section.table.push_back(
        {rows.front()->case_name + others, rows.front()->metric, "-", "-", "-", rows.front()->word(), reason});
  }
  return section;
}

}  // namespace tandem
