// SPDX-License-Identifier: Apache-2.0
#include "harness/report/result_charts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "harness/text_table.h"

namespace tandem {
namespace {

constexpr std::size_t kMostBars = 24;

std::vector<std::string> suites_of(const ResultFile& file) {
  std::vector<std::string> suites;
  for (const CaseResult& result : file.cases) {
    if (std::find(suites.begin(), suites.end(), result.suite) == suites.end()) suites.push_back(result.suite);
  }
  return suites;
}

bool is_judged(const Verdict& verdict) {
  return verdict.status != Status::skip && !(verdict.tensors.empty() && verdict.properties.empty());
}

// Marks of one row lie beside each other: five heights, the same in every run.
double spread(std::size_t index) { return 0.12 * (static_cast<double>(index * 2 % 5) - 2); }

struct Marks {
  ChartSeries pass{.name = "pass", .points = true};
  ChartSeries fail{.name = "fail or invalid", .points = true};
  ChartSeries none{.name = "no error at all", .points = true};
};

// Where a logarithm has no place for a value: errors of zero stand at the left end, errors beyond a bound of zero at the right
// one.
Marks marks_of(const ResultFile& file, const std::vector<std::string>& suites) {
  double least = 0.1, most = 2;
  for (const CaseResult& result : file.cases) {
    const double ratio = result.verdict.error_over_bound;
    if (!is_judged(result.verdict) || !std::isfinite(ratio) || ratio <= 0) continue;
    least = std::min(least, ratio);
    most = std::max(most, ratio);
  }
  Marks marks;
  std::map<std::string, std::size_t> seen;
  for (const CaseResult& result : file.cases) {
    const Verdict& verdict = result.verdict;
    if (!is_judged(verdict)) continue;
    const bool has_error = !(verdict.error_over_bound <= 0);
    ChartSeries& series = verdict.status != Status::pass ? marks.fail : has_error ? marks.pass : marks.none;
    const double ratio = std::isfinite(verdict.error_over_bound) ? std::max(verdict.error_over_bound, least / 3) : most * 3;
    const auto row = std::find(suites.begin(), suites.end(), result.suite) - suites.begin();
    series.x.push_back(has_error ? ratio : least / 3);
    series.y.push_back(static_cast<double>(row) + spread(seen[result.suite]++));
  }
  return marks;
}

Chart error_chart(const ResultFile& file) {
  const std::vector<std::string> suites = suites_of(file);
  Marks marks = marks_of(file, suites);
  const double bottom = static_cast<double>(suites.size()) - 0.5;
  ChartSeries bound{.name = "bound", .x = {1, 1}, .y = {-0.5, bottom}};
  return {.id = "error_over_bound",
          .title = "Error over bound",
          .caption =
              "A mark for each case that was judged: the largest error of a tensor, or value of a property, over what is "
              "allowed. Right of 1 a case fails; left of it one may fail by another check. At the left end: equal bits, or no "
              "error at all; at the right end: a difference where none is allowed.",
          .x_label = "error / bound",
          .log_x = true,
          .series = {std::move(marks.pass), std::move(marks.fail), std::move(marks.none), std::move(bound)},
          .rows = suites};
}

Chart diagonal_chart(const std::string& id, const std::string& title, const std::string& what) {
  return {.id = id,
          .title = title,
          .x_label = what + ", predicted",
          .y_label = "measured",
          .log_x = true,
          .log_y = true,
          .diagonal = true};
}

void add_pair(ChartSeries& series, std::int64_t predicted, std::int64_t measured) {
  if (predicted <= 0 || measured <= 0) return;
  series.x.push_back(static_cast<double>(predicted));
  series.y.push_back(static_cast<double>(measured));
}

// Says how far from equal the series are. Empty ones stay, so that each keeps its colour in every report.
Chart with_caption(Chart chart) {
  for (const ChartSeries& series : chart.series) {
    double least = HUGE_VAL, most = 0;
    for (std::size_t i = 0; i < series.y.size(); ++i) {
      least = std::min(least, series.y[i] / series.x[i]);
      most = std::max(most, series.y[i] / series.x[i]);
    }
    if (series.y.empty()) continue;
    chart.caption += fmt::format("{}{} {:.3f} to {:.3f} ({} cases)", chart.caption.empty() ? "Measured over predicted: " : ", ",
                                 series.name, least, most, series.y.size());
  }
  return chart;
}

bool is_empty(const Chart& chart) {
  return std::all_of(chart.series.begin(), chart.series.end(), [](const ChartSeries& series) { return series.y.empty(); });
}

Chart memory_chart(const ResultFile& file) {
  Chart chart = diagonal_chart("memory", "Peak memory, measured and predicted", "bytes of the worst rank");
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    ChartSeries series{.name = std::string(name(static_cast<MemoryCategory>(i))), .points = true};
    for (const CaseResult& result : file.cases) {
      if (result.measurements) add_pair(series, result.measurements->predicted_peak_bytes[i], result.measurements->peak_bytes[i]);
    }
    chart.series.push_back(std::move(series));
  }
  return with_caption(std::move(chart));
}

Chart wire_chart(const ResultFile& file) {
  Chart chart = diagonal_chart("wire_bytes", "Bytes sent, measured and predicted", "bytes of a step, all ranks");
  ChartSeries series{.name = "all purposes", .points = true};
  for (const CaseResult& result : file.cases) {
    if (result.measurements) add_pair(series, result.measurements->predicted_bytes_on_wire, result.measurements->bytes_on_wire);
  }
  chart.series.push_back(std::move(series));
  return with_caption(std::move(chart));
}

std::string short_name(const CaseResult& result) {
  const std::string start = result.suite + "/";
  return result.name.starts_with(start) ? result.name.substr(start.size()) : result.name;
}

Chart split_chart(const std::string& suite, std::vector<const CaseResult*> cases) {
  const std::size_t all = cases.size();
  std::stable_sort(cases.begin(), cases.end(), [](const CaseResult* a, const CaseResult* b) {
    return a->measurements->step_seconds.median > b->measurements->step_seconds.median;
  });
  cases.resize(std::min(all, kMostBars));
  struct Part {
    const char* name;
    double Measurements::*share;
  };
  constexpr std::array kParts = {Part{"compute", &Measurements::compute_share},
                                 Part{"exposed communication", &Measurements::exposed_share},
                                 Part{"data", &Measurements::data_share}, Part{"checkpoint", &Measurements::checkpoint_share},
                                 Part{"idle", &Measurements::idle_share}};
  Chart chart{.id = "time_split_" + suite,
              .title = "Time split: " + suite,
              .caption = fmt::format("Share of a step, mean over ranks. {} of {} measured cases, longest steps first.",
                                     cases.size(), all),
              .x_label = "% of the step"};
  std::vector<double> ends(cases.size(), 0.0);
  for (const Part& part : kParts) {
    ChartSeries series{.name = part.name, .spans = true};
    for (std::size_t row = 0; row < cases.size(); ++row) {
      const double share = 100 * (*cases[row]->measurements).*part.share;
      series.y.push_back(static_cast<double>(row));
      series.low.push_back(ends[row]);
      series.high.push_back(ends[row] += share);
    }
    chart.series.push_back(std::move(series));
  }
  for (const CaseResult* result : cases) {
    chart.rows.push_back(fmt::format("{} {}", short_name(*result), human_seconds(result->measurements->step_seconds.median)));
  }
  return chart;
}

}  // namespace

std::vector<ReportSection> result_sections(const ResultFile& file) {
  ReportSection equivalence{.title = "Equivalence"};
  if (!file.cases.empty()) equivalence.charts.push_back(error_chart(file));
  ReportSection predictions{.title = "Measured and predicted",
                            .text = "Predicted by formula and step program before the run; on the line both are equal.",
                            .charts = {memory_chart(file), wire_chart(file)}};
  ReportSection time{
      .title = "Where the time goes",
      .text =
          "How a step of each measured case splits. Cases are small: exposed communication of ranks that share a processor "
          "includes waiting for their turn."};
  for (const std::string& suite : suites_of(file)) {
    std::vector<const CaseResult*> cases;
    for (const CaseResult& result : file.cases) {
      if (result.suite == suite && result.measurements && std::isfinite(result.measurements->compute_share))
        cases.push_back(&result);
    }
    if (!cases.empty()) time.charts.push_back(split_chart(suite, std::move(cases)));
  }
  std::vector<ReportSection> sections = {std::move(equivalence), std::move(predictions), std::move(time)};
  for (ReportSection& section : sections) {
    std::erase_if(section.charts, is_empty);
  }
  std::erase_if(sections, [](const ReportSection& section) { return section.charts.empty(); });
  return sections;
}

}  // namespace tandem
