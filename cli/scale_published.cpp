// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/scale_command.h"
#include "cli/scaling_report.h"
#include "cli/terminal.h"
#include "harness/text_table.h"
#include "optimized/scaling/published.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

std::string signed_share(double share) { return fmt::format("{:+.1f} %", 100 * share); }

// What keeps a row out of the gates.
std::string remark_of(const PublishedRow& row) {
  if (row.suspect) return "suspect";
  if (row.from_memory) return "from memory";
  if (row.approximate) return "read off a chart";
  return row.complete ? "-" : "not all stated";
}

CellRows rows_of(const std::vector<PublishedError>& errors) {
  CellRows rows = {{"id", "GPUs", "hardware", "layout", "published", "predicted", "error", "remark"}};
  for (const PublishedError& error : errors) {
    const PublishedRow& row = *error.row;
    const bool refused = !error.refused.empty();
    rows.push_back({row.id, fmt::format("{}", row.devices), row.hardware, degrees_text(row.workload.plan.parallel),
                    human_seconds(row.step_seconds), refused ? "-" : human_seconds(error.predicted_seconds),
                    refused ? "-" : signed_share(error.relative()), refused ? error.refused : remark_of(row)});
  }
  return rows;
}

std::string sources_of(const std::vector<PublishedError>& errors) {
  std::set<std::string> sources;
  for (const PublishedError& error : errors) sources.insert(error.row->source);
  std::string text;
  for (const std::string& source : sources) text += "source: " + source + "\n";
  return text;
}

CellRows summary_rows(const std::vector<ErrorSummary>& summaries) {
  CellRows rows = {{"set", "rows", "median error", "90th percentile", "worst", "mean, signed", "Kendall tau"}};
  for (const ErrorSummary& summary : summaries) {
    if (summaries.size() == 2 && &summary == &summaries.back()) continue;  // of all, which is the one set
    rows.push_back({summary.name, fmt::format("{}", summary.rows), human_share(summary.median_absolute),
                    human_share(summary.p90_absolute), human_share(summary.worst_absolute), signed_share(summary.mean_signed),
                    summary.tables > 0 ? fmt::format("{:.2f}", summary.kendall_tau) : "-"});
  }
  return rows;
}

Chart scatter(const std::vector<PublishedError>& errors, const std::string& set) {
  std::map<std::string, ChartSeries> by_set;
  for (const PublishedError& error : errors) {
    if (!error.refused.empty()) continue;
    ChartSeries& series =
        by_set.try_emplace(error.row->set, ChartSeries{.name = error.row->set, .x = {}, .y = {}, .points = true}).first->second;
    series.x.push_back(error.row->step_seconds);
    series.y.push_back(error.predicted_seconds);
  }
  Chart chart{.id = "published_" + set,
              .title = "Published and predicted step times",
              .caption = "On the line they are equal.",
              .x_label = "published, seconds",
              .y_label = "predicted, seconds",
              .log_x = true,
              .log_y = true,
              .diagonal = true,
              .series = {}};
  for (auto& [name, series] : by_set) chart.series.push_back(std::move(series));
  std::replace_if(
      chart.id.begin(), chart.id.end(), [](char c) { return c == '.'; }, '_');
  return chart;
}

Json errors_json(const std::vector<PublishedError>& errors) {
  Json all = Json::array();
  for (const PublishedError& error : errors) {
    const PublishedRow& row = *error.row;
    Json json = {{"id", row.id},
                 {"set", row.set},
                 {"table", row.table},
                 {"source", row.source},
                 {"gpus", row.devices},
                 {"published_seconds", row.step_seconds},
                 {"gated", is_gated(row)},
                 {"complete", row.complete},
                 {"approximate", row.approximate},
                 {"suspect", row.suspect},
                 {"from_memory", row.from_memory}};
    if (error.refused.empty()) {
      json["predicted_seconds"] = error.predicted_seconds;
      json["error"] = error.relative();
    } else {
      json["refused"] = error.refused;
    }
    all.push_back(std::move(json));
  }
  return all;
}

Json summaries_json(const std::vector<ErrorSummary>& summaries) {
  Json all = Json::array();
  for (const ErrorSummary& summary : summaries) {
    Json json = {{"set", summary.name},
                 {"rows", summary.rows},
                 {"median_absolute", summary.median_absolute},
                 {"p90_absolute", summary.p90_absolute},
                 {"worst_absolute", summary.worst_absolute},
                 {"mean_signed", summary.mean_signed},
                 {"kendall_tau", nullptr}};
    if (summary.tables > 0) json["kendall_tau"] = summary.kendall_tau;
    all.push_back(std::move(json));
  }
  return all;
}

}  // namespace

ScaleResult scale_published(const ScaleArguments& arguments) {
  const std::vector<PublishedRow> rows = published_rows(arguments.published);
  const std::vector<PublishedError> errors = predict(rows);
  std::vector<ErrorSummary> summaries = summarize(errors);
  if (arguments.published == "all") {
    std::vector<PublishedError> gated;
    std::copy_if(errors.begin(), errors.end(), std::back_inserter(gated), [](const auto& error) { return is_gated(*error.row); });
    summaries.push_back(summarize(gated).back());
    summaries.back().name = "all that state everything";
  }
  const CellRows table = rows_of(errors);
  const CellRows summary = summary_rows(summaries);
  ScaleResult result;
  if (arguments.published != "all") result.text = rendered(table, output_style()) + sources_of(errors) + "\n";
  result.text += rendered(summary, output_style());
  const std::string title = fmt::format("Published and predicted: {}", arguments.published);
  result.sections.push_back({.title = title,
                             .text = "Each row is simulated with its own published configuration. " + sources_of(errors),
                             .charts = {scatter(errors, arguments.published)},
                             .table = arguments.published == "all" ? summary : table});
  result.document = Json{{"published", errors_json(errors)}, {"summaries", summaries_json(summaries)}}.dump();
  return result;
}

}  // namespace tandem
