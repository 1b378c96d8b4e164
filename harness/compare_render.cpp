// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/compare.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

bool is_time(const MetricComparison& row) { return row.metric == "step_seconds" || row.metric == "seconds_per_token_and_rank"; }

std::string value_cell(const MetricComparison& row, double value) {
  if (!std::isfinite(value)) return "-";
  if (is_time(row)) return human_seconds(value);
  if (row.metric == "verdict") return fmt::format("{:.3g}", value);
  return human_bytes(static_cast<std::int64_t>(value));
}

std::string interval_cell(const MetricComparison& row) {
  if (!is_time(row) || !std::isfinite(row.ratio.value)) return "-";
  const std::string interval = fmt::format("{:.3f} to {:.3f}", row.ratio.ci95.low, row.ratio.ci95.high);
  return row.coverage < 0.95 ? fmt::format("{} ({:.0f} %)", interval, 100 * row.coverage) : interval;
}

std::string effect_cell(const MetricComparison& row) {
  return is_time(row) && std::isfinite(row.effect) ? fmt::format("{:+.2f}", row.effect) : "-";
}

std::string conclusion(const Comparison& comparison) {
  const int few = comparison.count(Change::few_samples);
  const std::string counts =
      fmt::format("{} same, {} better, {} worse, {} too noisy to tell, {} not comparable{}", comparison.count(Change::same),
                  comparison.count(Change::better), comparison.count(Change::worse), comparison.count(Change::too_noisy),
                  comparison.count(Change::not_comparable), few > 0 ? fmt::format(", {} decided together", few) : "");
  switch (comparison.exit_status()) {
    case 0: return counts + ": no regression";
    case 1: return counts + ": regression";
    default: break;
  }
  if (comparison.rows.empty()) return "undecided: there is nothing to compare";
  return counts + ": undecided";
}

std::string numbers_line(const Comparison& comparison) {
  if (comparison.numbers_compared == 0) return {};
  std::string text = fmt::format("numbers: {} of {} cases have the same errors to the last digit", comparison.numbers_identical,
                                 comparison.numbers_compared);
  if (!comparison.first_other_numbers.empty()) text += "; first other one: " + comparison.first_other_numbers;
  return text + "\n";
}

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

const char* key_of(Change change) {
  switch (change) {
    case Change::same: return "same";
    case Change::better: return "better";
    case Change::worse: return "worse";
    case Change::too_noisy: return "too_noisy";
    case Change::not_comparable: return "not_comparable";
    case Change::few_samples: return "few_samples";
  }
  return "?";
}

Json ratio_json(const Ratio& ratio) {
  return {{"value", number(ratio.value)}, {"ci95", Json::array({number(ratio.ci95.low), number(ratio.ci95.high)})}};
}

Json attribution_json(const Attribution& attribution) {
  Json causes = Json::array();
  for (const CauseShare& cause : attribution.causes) {
    causes.push_back({{"cause", name(cause.cause)},
                      {"seconds", number(cause.seconds)},
                      {"share", number(cause.share)},
                      {"ratio", ratio_json(cause.ratio)}});
  }
  return {{"verdict", name(attribution.verdict)},
          {"sentence", attribution.sentence},
          {"cases", attribution.cases},
          {"seconds_a", number(attribution.seconds_a)},
          {"seconds_b", number(attribution.seconds_b)},
          {"ratio", ratio_json(attribution.ratio)},
          {"causes", std::move(causes)}};
}

Json document_of(const Comparison& comparison) {
  Json rows = Json::array();
  for (const MetricComparison& row : comparison.rows) {
    rows.push_back({{"case", row.case_name},
                    {"metric", row.metric.empty() ? Json(nullptr) : Json(row.metric)},
                    {"a", number(row.a)},
                    {"b", number(row.b)},
                    {"ratio", number(row.ratio.value)},
                    {"ci95", Json::array({number(row.ratio.ci95.low), number(row.ratio.ci95.high)})},
                    {"coverage", number(row.coverage)},
                    {"effect", number(row.effect)},
                    {"change", key_of(row.change)},
                    {"result", row.word()},
                    {"reason", row.reason}});
  }
  Json summary = Json::object();
  for (const Change change :
       {Change::same, Change::better, Change::worse, Change::too_noisy, Change::not_comparable, Change::few_samples}) {
    summary[key_of(change)] = comparison.count(change);
  }
  return {{"schema_version", 1},
          {"a", comparison.name_a},
          {"b", comparison.name_b},
          {"threshold", comparison.threshold},
          {"notes", comparison.notes},
          {"rows", std::move(rows)},
          {"numbers",
           {{"compared", comparison.numbers_compared},
            {"identical", comparison.numbers_identical},
            {"first_other", comparison.first_other_numbers}}},
          {"attribution", attribution_json(comparison.attribution)},
          {"summary", std::move(summary)},
          {"exit_status", comparison.exit_status()}};
}

std::string dump(const Json& document) { return document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n"; }

// A line for each machine: how it stands against the first one.
std::string machines_table(const std::vector<Comparison>& comparisons, TableStyle style) {
  TextTable table({"file", "cases", "time of A's", "95 % interval", "gap belongs to", "share", "exit status"});
  for (const Comparison& comparison : comparisons) {
    const Attribution& gap = comparison.attribution;
    const bool measured = gap.cases > 0;
    const bool decided = measured && (gap.ratio.ci95.low > 1 || gap.ratio.ci95.high < 1);
    table.add({comparison.name_b, fmt::to_string(gap.cases), measured ? fmt::format("{:.3f} x", gap.ratio.value) : "-",
               measured ? fmt::format("{:.3f} to {:.3f}", gap.ratio.ci95.low, gap.ratio.ci95.high) : "-",
               decided ? std::string(name(gap.verdict)) : "-", decided ? human_share(gap.causes.front().share) : "-",
               fmt::to_string(comparison.exit_status())});
  }
  return table.render(style);
}

}  // namespace

std::string render(const Comparison& comparison, TableStyle style) {
  std::string text = fmt::format("A: {}\nB: {}\n", comparison.name_a, comparison.name_b);
  for (const std::string& note : comparison.notes) text += "differs in " + note + "\n";
  TextTable table({"case", "metric", "A", "B", "B/A", "95 % interval", "effect", "result", "why"});
  for (const MetricComparison& row : comparison.rows) {
    table.add({row.case_name, row.metric.empty() ? "-" : row.metric, value_cell(row, row.a), value_cell(row, row.b),
               std::isfinite(row.ratio.value) ? fmt::format("{:.3f}", row.ratio.value) : "-", interval_cell(row),
               effect_cell(row), row.word(), row.reason});
  }
  text += table.render(style) + numbers_line(comparison);
  if (comparison.attribution.cases > 0) text += "gap: " + comparison.attribution.sentence + "\n";
  return text + fmt::format("threshold {:.3g} %. {}\n", comparison.threshold * 100, conclusion(comparison));
}

std::string render(const std::vector<Comparison>& comparisons, TableStyle style) {
  std::string text;
  for (const Comparison& comparison : comparisons) text += render(comparison, style) + "\n";
  return text + machines_table(comparisons, style);
}

std::string to_json(const Comparison& comparison) { return dump(document_of(comparison)); }

std::string to_json(const std::vector<Comparison>& comparisons) {
  Json list = Json::array();
  for (const Comparison& comparison : comparisons) list.push_back(document_of(comparison));
  return dump({{"schema_version", 1},
               {"baseline", comparisons.empty() ? "" : comparisons.front().name_a},
               {"comparisons", std::move(list)},
               {"exit_status", exit_status(comparisons)}});
}

}  // namespace tandem
