// SPDX-License-Identifier: Apache-2.0
#include "harness/report/report.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "harness/report/chart.h"
#include "harness/report/html.h"
#include "harness/report/plain_text.h"
#include "harness/report/result_charts.h"
#include "harness/table.h"

namespace tandem {
namespace {

using Rows = std::vector<std::vector<std::string>>;

Rows environment_rows(const ReportInput& input) {
  Rows rows = {{"", "date", "processor", "cores", "memory", "GPUs", "system", "compiler", "commit", "libraries", "backend",
                "link", "ranks", "seed", "repetitions"}};
  for (const auto& [name, file] : input.results) {
    const Environment& at = file.environment;
    std::vector<std::string> libraries;
    for (const auto& [library, version] : at.libraries) libraries.push_back(library + " " + version);
    rows.push_back(
        {name, at.date, fmt::format("{}, {}", at.cpu, at.instruction_set), fmt::format("{} of {}", at.usable_cores, at.cores),
         human_bytes(at.memory_bytes), at.gpus.empty() ? "none" : fmt::format("{}", fmt::join(at.gpus, ", ")),
         at.operating_system, fmt::format("{}, {}", at.compiler, at.build_type),
         at.git_commit.substr(0, 12) + (at.git_dirty ? ", changed" : ""), fmt::format("{}", fmt::join(libraries, ", ")),
         fmt::format("{}, {}, sums {}", at.backend, at.transport, at.algorithm), at.link,
         fmt::format("up to {}, threads each: {}", at.ranks, at.threads_per_rank), fmt::format("{}", at.seed),
         fmt::format("{}", at.repetitions)});
  }
  Rows turned(rows.front().size());
  for (std::size_t column = 0; column < turned.size(); ++column) {
    for (const auto& row : rows) turned[column].push_back(row[column]);
  }
  return turned;
}

void add_warnings(HtmlPage& page, const ResultFile& file) {
  if (!file.environment.pitfalls.empty()) {
    page.paragraph(
        fmt::format("Faults were planted in this run ({}): it proves nothing.", fmt::join(file.environment.pitfalls, ", ")),
        "warning");
  }
  if (file.interrupted) page.paragraph("This run was interrupted: cases are missing.", "warning");
  if (file.environment.adversary != "none") {
    page.paragraph("Messages were delayed on purpose: times say nothing about this machine.", "warning");
  }
}

std::vector<std::string> verdict_row(const CaseResult& result) {
  const Verdict& verdict = result.verdict;
  const bool is_judged = !(verdict.tensors.empty() && verdict.properties.empty());
  std::string ratio = "-";
  if (is_judged) ratio = std::isfinite(verdict.error_over_bound) ? fmt::format("{:.3g}", verdict.error_over_bound) : "differs";
  if (is_judged && verdict.criterion == Criterion::bitwise && verdict.error_over_bound == 0) ratio = "equal bits";
  const std::string prefix = result.suite + "/";
  std::vector<std::string> row = {std::string(name(verdict.status)),
                                  result.name.starts_with(prefix) ? result.name.substr(prefix.size()) : result.name, ratio,
                                  verdict.worst_tensor};
  if (result.measurements) {
    const Measurements& measured = *result.measurements;
    row.push_back(fmt::format("{} ({} to {})", human_seconds(measured.step_seconds.median),
                              human_seconds(measured.step_seconds.ci95_low), human_seconds(measured.step_seconds.ci95_high)));
    row.push_back(human_count(measured.tokens_per_second));
    row.push_back(human_bytes(std::accumulate(measured.peak_bytes.begin(), measured.peak_bytes.end(), std::int64_t{0})));
    row.push_back(human_share(measured.exposed_share));
  } else {
    row.insert(row.end(), 4, "-");
  }
  return row;
}

void add_verdicts(HtmlPage& page, const ResultFile& file) {
  page.paragraph(closing_line(count(file.cases)), "counts");
  add_warnings(page, file);
  for (const CaseResult& result : file.cases) {
    if (result.verdict.status == Status::pass || result.verdict.status == Status::skip) continue;
    page.paragraph(fmt::format("{}: {}: {}{}", name(result.verdict.status), result.name, result.verdict.reason,
                               result.localisation ? " " + describe(*result.localisation) : ""),
                   "warning");
  }
  std::vector<std::string> suites;
  for (const CaseResult& result : file.cases) {
    if (std::find(suites.begin(), suites.end(), result.suite) == suites.end()) suites.push_back(result.suite);
  }
  for (const std::string& suite : suites) {
    std::vector<CaseResult> cases;
    Rows rows = {{"status", "case", "error / bound", "worst tensor or property", "step (its 95 % interval)", "tokens/s",
                  "peak memory", "exposed comm."}};
    for (const CaseResult& result : file.cases) {
      if (result.suite != suite) continue;
      rows.push_back(verdict_row(result));
      cases.push_back(result);
    }
    const Counts counts = count(cases);
    page.begin_details(fmt::format("{}: {}", suite, closing_line(counts)), !counts.good() || suites.size() == 1);
    page.table(rows);
    for (const CaseResult& result : cases) {
      if (result.verdict.status == Status::skip)
        page.paragraph(fmt::format("skip: {}: {}", result.name, result.verdict.reason), "soft");
    }
    page.end_details();
  }
}

// The sections of the page in their order; ids of charts are made unique, for a page and a folder hold all of them.
struct Layout {
  std::vector<std::vector<ReportSection>> by_result;
  std::vector<ReportSection> rest;
};

void make_unique(Chart& chart, std::set<std::string>& ids) {
  const std::string id = chart.id;
  for (int copy = 2; !ids.insert(chart.id).second; ++copy) chart.id = fmt::format("{}-{}", id, copy);
}

Layout layout_of(const ReportInput& input) {
  Layout layout;
  for (const auto& [name, file] : input.results) layout.by_result.push_back(result_sections(file));
  if (!input.traces.empty()) layout.rest.push_back(timeline_section(input.traces));
  for (std::size_t i = 1; i < input.results.size(); ++i) {
    const auto& [name_a, a] = input.results.front();
    const auto& [name_b, b] = input.results[i];
    layout.rest.push_back(comparison_section(a, b, name_a, name_b));
  }
  layout.rest.insert(layout.rest.end(), input.sections.begin(), input.sections.end());
  std::set<std::string> ids;
  for (auto& sections : layout.by_result) {
    for (ReportSection& section : sections) {
      for (Chart& chart : section.charts) make_unique(chart, ids);
    }
  }
  for (ReportSection& section : layout.rest) {
    for (Chart& chart : section.charts) make_unique(chart, ids);
  }
  return layout;
}

}  // namespace

std::string render_html(const ReportInput& input) {
  const Layout layout = layout_of(input);
  HtmlPage page;
  std::string title = "tandem report";
  for (std::size_t i = 0; i < input.results.size(); ++i) {
    const auto& [name, file] = input.results[i];
    title += (i == 0 ? ": " : ", ") + name;
    const std::string suffix = input.results.size() == 1 ? "" : ": " + name;
    page.begin_part("Verdicts" + suffix);
    add_verdicts(page, file);
    for (ReportSection section : layout.by_result[i]) {
      section.title += suffix;
      page.section(section);
    }
  }
  for (const ReportSection& section : layout.rest) page.section(section);
  if (!input.results.empty()) {
    page.begin_part("Environment");
    page.table(environment_rows(input), "facts");
  }
  return std::move(page).finish(title);
}

std::vector<std::filesystem::path> export_charts(const ReportInput& input, const std::filesystem::path& folder,
                                                 const std::string& format) {
  const Layout layout = layout_of(input);
  const ChartFormat written = format == "png" ? ChartFormat::png : format == "pdf" ? ChartFormat::pdf : ChartFormat::svg;
  if (format != "png" && format != "pdf" && format != "svg") {
    throw InputError(fmt::format("charts are written as png, pdf or svg, not as '{}'", printable(format)));
  }
  std::vector<std::filesystem::path> files;
  const auto write = [&](const std::vector<ReportSection>& sections) {
    for (const ReportSection& section : sections) {
      for (const Chart& chart : section.charts) {
        files.push_back(folder / (chart.id + "." + format));
        write_file_atomically(files.back(), run_gnuplot(gnuplot_script(chart, written), written));
      }
    }
  };
  for (const auto& sections : layout.by_result) write(sections);
  write(layout.rest);
  return files;
}

}  // namespace tandem
