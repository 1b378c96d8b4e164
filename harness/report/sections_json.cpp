// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/json_field.h"
#include "harness/report/chart.h"
#include "harness/report/report.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kVersion = 1;

Json numbers(const std::vector<double>& values) {
  Json list = Json::array();
  for (const double value : values) list.push_back(number_to_json(value));
  return list;
}

Json series_json(const ChartSeries& series) {
  return {{"name", series.name},          {"x", numbers(series.x)},  {"y", numbers(series.y)},  {"low", numbers(series.low)},
          {"high", numbers(series.high)}, {"labels", series.labels}, {"points", series.points}, {"spans", series.spans}};
}

Json chart_json(const Chart& chart) {
  Json series = Json::array();
  for (const ChartSeries& one : chart.series) series.push_back(series_json(one));
  return {{"id", chart.id},           {"title", chart.title},     {"caption", chart.caption},
          {"x_label", chart.x_label}, {"y_label", chart.y_label}, {"log_x", chart.log_x},
          {"log_y", chart.log_y},     {"stacked", chart.stacked}, {"diagonal", chart.diagonal},
          {"rows", chart.rows},       {"series", series}};
}

bool flag(const JsonField& parent, const char* key) {
  if (!parent.has(key)) return false;
  const JsonField field = parent[key];
  field.require(field.value().is_boolean(), "is neither true nor false");
  return field.value().get<bool>();
}

std::vector<JsonField> list(const JsonField& parent, const char* key) {
  return parent.has(key) ? parent[key].elements() : std::vector<JsonField>{};
}

std::string text(const JsonField& parent, const char* key) { return parent.has(key) ? parent[key].text() : ""; }

std::vector<std::string> texts(const std::vector<JsonField>& fields) {
  std::vector<std::string> all;
  for (const JsonField& field : fields) all.push_back(field.text());
  return all;
}

std::vector<double> values(const JsonField& parent, const char* key) {
  std::vector<double> all;
  for (const JsonField& field : list(parent, key)) all.push_back(field.number());
  return all;
}

ChartSeries read_series(const JsonField& field) {
  return {text(field, "name"),   values(field, "x"),           values(field, "y"),    values(field, "low"),
          values(field, "high"), texts(list(field, "labels")), flag(field, "points"), flag(field, "spans")};
}

Chart read_chart(const JsonField& field) {
  Chart chart{.id = field["id"].text(),
              .title = field["title"].text(),
              .caption = text(field, "caption"),
              .x_label = text(field, "x_label"),
              .y_label = text(field, "y_label"),
              .log_x = flag(field, "log_x"),
              .log_y = flag(field, "log_y"),
              .stacked = flag(field, "stacked"),
              .diagonal = flag(field, "diagonal"),
              .rows = texts(list(field, "rows"))};
  for (const JsonField& series : field["series"].elements()) chart.series.push_back(read_series(series));
  const std::string problem = problem_of(chart);
  field.require(problem.empty(), problem);
  return chart;
}

ReportSection read_section(const JsonField& field) {
  ReportSection section{.title = field["title"].text(), .text = text(field, "text")};
  for (const JsonField& chart : list(field, "charts")) section.charts.push_back(read_chart(chart));
  for (const JsonField& row : list(field, "table")) {
    section.table.push_back(texts(row.elements()));
    row.require(section.table.back().size() == section.table.front().size(), "has another number of cells than the first row");
  }
  return section;
}

}  // namespace

std::string to_json(const std::vector<ReportSection>& sections) {
  Json all = Json::array();
  for (const ReportSection& section : sections) {
    Json charts = Json::array();
    for (const Chart& chart : section.charts) charts.push_back(chart_json(chart));
    all.push_back({{"title", section.title}, {"text", section.text}, {"charts", charts}, {"table", section.table}});
  }
  return Json{{"sections_version", kVersion}, {"sections", all}}.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::vector<ReportSection> sections_from_json(const std::string& text, const std::string& source_name) {
  const nlohmann::json document = parse_json_object(text, source_name);
  const JsonField root(source_name, document);
  const JsonField version = root["sections_version"];
  version.require(version.count() == kVersion, fmt::format("is not {}, which this program reads", kVersion));
  std::vector<ReportSection> sections;
  for (const JsonField& section : root["sections"].elements()) sections.push_back(read_section(section));
  return sections;
}

bool holds_sections(const std::string& text) {
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, false);
  return document.is_object() && document.contains("sections_version");
}

}  // namespace tandem
