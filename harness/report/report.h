// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "harness/attribution.h"
#include "harness/chrome_trace.h"
#include "harness/compare.h"
#include "harness/result_file.h"

namespace tandem {

/// Points of one name. Values that are not finite are gaps; what a log axis cannot show is left out.
struct ChartSeries {
  std::string name;
  std::vector<double> x = {}, y = {};
  std::vector<double> low = {}, high = {};  ///< intervals; empty: none
  std::vector<std::string> labels = {};     ///< of the points, written beside them where a chart has few
  bool points = false;                      ///< marks, not a line
  bool spans = false;                       ///< boxes from low to high at y, such as a part of a bar or of a rank's time
};
/// A chart as data: the report draws it and knows no technique.
struct Chart {
  std::string id;  ///< name of the exported file: lower-case letters, digits, '_', '-'
  std::string title, caption = {}, x_label = {}, y_label = {};
  bool log_x = false, log_y = false;
  bool stacked = false;   ///< areas, each series on those before it, all with the same x; no rows
  bool diagonal = false;  ///< y = x is drawn, and both axes have one range
  std::vector<ChartSeries> series = {};
  /// Names of y = 0, 1, ... from the top, for charts of one row each: the quantity is x, and intervals lie along it.
  std::vector<std::string> rows = {};
};

/// What commands hand over beside result files: scaling curves, errors of the simulator, claims.
struct ReportSection {
  std::string title, text = {};
  std::vector<Chart> charts = {};
  std::vector<std::vector<std::string>> table = {};  ///< first row: heads
};
struct ReportInput {
  std::vector<std::pair<std::string, ResultFile>> results = {};  ///< with the names of their files
  std::vector<ReportSection> sections = {};
  std::vector<TraceGroup> traces = {};  ///< runs of which the last step is drawn by rank; see read_chrome_trace()
};

/// Charts as SVG by gnuplot (one process, scripts on its input, no files left); where gnuplot is not there an InputError says
/// what to install. Same input, same bytes. Its ids begin with that of the chart; axes and text have the colour of the text
/// around it. Throws ContractError where the chart contradicts itself (lengths, id).
[[nodiscard]] std::string render_svg(const Chart& chart);
/// One page: verdicts, error over bound, memory measured and predicted, time split, sections, timelines, comparison of machines
/// (from two results on: each with the first). No script, no font, no link that it needs: opens offline, prints, and fits a
/// phone. The page is well-formed XML as well as HTML. Nothing of the input is taken for markup.
[[nodiscard]] std::string render_html(const ReportInput& input);
/// Every chart of the page as "png", "pdf" or "svg" into a folder, which exists; returns the files in the order of the page.
[[nodiscard]] std::vector<std::filesystem::path> export_charts(const ReportInput& input, const std::filesystem::path& folder,
                                                               const std::string& format);

/// Sections travel between commands (tandem scale --json, tandem claims --json, then tandem report) as JSON:
/// {"sections_version": 1, "sections": [...]}. Other keys may stand beside these two and are not read.
[[nodiscard]] std::string to_json(const std::vector<ReportSection>& sections);
/// Throws InputError, naming source and field.
[[nodiscard]] std::vector<ReportSection> sections_from_json(const std::string& text, const std::string& source_name);
/// Whether a JSON text is one of sections, or of something else.
[[nodiscard]] bool holds_sections(const std::string& text);

/// Inverse of to_chrome_trace(): of its complete events ("X"), with ranks from the names of the processes. Throws InputError.
[[nodiscard]] std::vector<TraceGroup> read_chrome_trace(const std::string& text, const std::string& source_name);

}  // namespace tandem
