// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "core/error.h"
#include "core/io/atomic_file.h"
#include "harness/report/report.h"
#include "suites/report_sections.h"

namespace tandem {
namespace {

struct ReportArguments {
  std::vector<std::string> files, traces;
  std::string html, charts, format = "png";
};

ReportInput read_input(const ReportArguments& arguments) {
  ReportInput input;
  std::vector<ReportSection> given;
  for (const std::string& file : arguments.files) {
    const std::string text = read_text_file(file);
    if (holds_sections(text)) {
      for (ReportSection& section : sections_from_json(text, file)) given.push_back(std::move(section));
      continue;
    }
    input.results.emplace_back(file, result_file_from_json(text, file));
  }
  for (const auto& [name, result] : input.results) {
    for (ReportSection& section : sweep_sections(result)) {
      if (input.results.size() > 1) section.title += ": " + name;
      input.sections.push_back(std::move(section));
    }
  }
  input.sections.insert(input.sections.end(), given.begin(), given.end());
  for (const std::string& file : arguments.traces) {
    for (TraceGroup& group : read_chrome_trace(read_text_file(file), file)) input.traces.push_back(std::move(group));
  }
  return input;
}

int report_action(const ReportArguments& arguments) {
  if (arguments.html.empty() && arguments.charts.empty()) {
    throw InputError("report: name what to write: --html FILE, --charts FOLDER, or both");
  }
  require_writable(arguments.html, "--html");
  require_writable_folder(arguments.charts, "--charts");
  const ReportInput input = read_input(arguments);
  if (!arguments.html.empty()) write_output(arguments.html, render_html(input));
  if (!arguments.charts.empty()) {
    for (const auto& file : export_charts(input, arguments.charts, arguments.format)) fmt::print("{}\n", file.string());
  }
  return kGood;
}

}  // namespace

void add_report_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("report", "One page of HTML with charts from result files; opens offline");
  const auto arguments = std::make_shared<ReportArguments>();
  command
      ->add_option(
          "FILES", arguments->files,
          "result files (tandem run --out) and sections (--json of tandem scale and tandem claims), in any order; from two "
          "results on, each is compared with the first")
      ->required();
  command->add_option("--html", arguments->html, "write the page to this file; - is standard output");
  command->add_option("--trace", arguments->traces, "trace of a run (tandem run --trace): draws a step of it by rank");
  command->add_option("--charts", arguments->charts, "write each chart as a file of its own into this folder");
  command->add_option("--format", arguments->format, "of these files")
      ->capture_default_str()
      ->check(CLI::IsMember({"png", "pdf", "svg"}));
  command->footer(
      "Example (after: tandem run data_parallel/ranks2 --out build/r.json):\n"
      "  tandem report build/r.json --html build/r.html");
  command->callback([&line, arguments] { line.action = [arguments] { return report_action(*arguments); }; });
}

}  // namespace tandem
