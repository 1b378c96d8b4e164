// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/compare.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

std::string value_cell(const MetricComparison& row, double value) {
  if (!std::isfinite(value)) return "-";
  if (row.metric == "step_seconds") return human_seconds(value);
  if (row.metric == "verdict") return fmt::format("{:.3g}", value);
  return human_bytes(static_cast<std::int64_t>(value));
}

std::string interval_cell(const MetricComparison& row) {
  if (row.metric != "step_seconds" || !std::isfinite(row.ratio.value)) return "-";
  return fmt::format("{:.3f} to {:.3f}", row.ratio.ci95.low, row.ratio.ci95.high);
}

std::string conclusion(const Comparison& comparison) {
  const std::string counts =
      fmt::format("{} same, {} better, {} worse, {} too noisy to tell, {} not comparable", comparison.count(Change::same),
                  comparison.count(Change::better), comparison.count(Change::worse), comparison.count(Change::too_noisy),
                  comparison.count(Change::not_comparable));
  switch (comparison.exit_status()) {
    case 0: return counts + ": no regression";
    case 1: return counts + ": regression";
    default: break;
  }
  if (comparison.rows.empty()) return "undecided: there is nothing to compare";
  return counts + ": undecided";
}

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

const char* key_of(Change change) {
  switch (change) {
    case Change::same: return "same";
    case Change::better: return "better";
    case Change::worse: return "worse";
    case Change::too_noisy: return "too_noisy";
    case Change::not_comparable: return "not_comparable";
  }
  return "?";
}

}  // namespace

std::string render(const Comparison& comparison, TableStyle style) {
  std::string text = fmt::format("A: {}\nB: {}\n", comparison.name_a, comparison.name_b);
  for (const std::string& note : comparison.notes) text += "differs in " + note + "\n";
  TextTable table({"case", "metric", "A", "B", "B/A", "95 % interval", "result", "why"});
  for (const MetricComparison& row : comparison.rows) {
    table.add({row.case_name, row.metric.empty() ? "-" : row.metric, value_cell(row, row.a), value_cell(row, row.b),
               std::isfinite(row.ratio.value) ? fmt::format("{:.3f}", row.ratio.value) : "-", interval_cell(row), row.word(),
               row.reason});
  }
  text += table.render(style);
  return text + fmt::format("threshold {:.3g} %. {}\n", comparison.threshold * 100, conclusion(comparison));
}

std::string to_json(const Comparison& comparison) {
  Json rows = Json::array();
  for (const MetricComparison& row : comparison.rows) {
    rows.push_back({{"case", row.case_name},
                    {"metric", row.metric.empty() ? Json(nullptr) : Json(row.metric)},
                    {"a", number(row.a)},
                    {"b", number(row.b)},
                    {"ratio", number(row.ratio.value)},
                    {"ci95", Json::array({number(row.ratio.ci95.low), number(row.ratio.ci95.high)})},
                    {"change", key_of(row.change)},
                    {"result", row.word()},
                    {"reason", row.reason}});
  }
  Json summary = Json::object();
  for (const Change change : {Change::same, Change::better, Change::worse, Change::too_noisy, Change::not_comparable}) {
    summary[key_of(change)] = comparison.count(change);
  }
  const Json document = {{"schema_version", 1},           {"a", comparison.name_a},
                         {"b", comparison.name_b},        {"threshold", comparison.threshold},
                         {"notes", comparison.notes},     {"rows", std::move(rows)},
                         {"summary", std::move(summary)}, {"exit_status", comparison.exit_status()}};
  return document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tandem
