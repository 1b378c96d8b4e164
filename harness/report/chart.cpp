// SPDX-License-Identifier: Apache-2.0
#include "harness/report/chart.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "harness/report/chart_layout.h"
#include "harness/report/plain_text.h"

namespace tandem {
namespace {

constexpr std::size_t kMostLabels = 12;

class Script {
 public:
  explicit Script(const Chart& chart) : layout_(chart) {}

  std::string finish(ChartFormat format) && {
    text_ = frame_script(layout_, format) + axes_script(layout_);
    if (layout_.x.is_empty() || layout_.y.is_empty()) {
      text_ +=
          "unset tics\nunset grid\nset label 'nothing to draw' at graph 0.5,0.5 center\nset xrange [1:2]\nset yrange [1:2]\nplot "
          "NaN notitle\n";
      return std::move(text_);
    }
    labels();
    if (layout_.chart.diagonal) add_diagonal();
    std::vector<double> below;
    for (std::size_t i = 0; i < layout_.chart.series.size(); ++i) add(layout_.chart.series[i], i, below);
    text_ += "plot ";
    for (std::size_t i = 0; i < plots_.size(); ++i) text_ += (i == 0 ? "" : ", \\\n  ") + plots_[i];
    text_ += "\n";
    return std::move(text_);
  }

 private:
  void labels() {
    std::size_t count = 0;
    for (const ChartSeries& series : layout_.chart.series) count += series.labels.size();
    if (count > kMostLabels) return;
    const auto place = [&](double x) {
      return layout_.is_log_x ? std::log(x / layout_.x.low) / std::log(layout_.x.high / layout_.x.low)
                              : (x - layout_.x.low) / (layout_.x.high - layout_.x.low);
    };
    for (const ChartSeries& series : layout_.chart.series) {
      for (std::size_t i = 0; i < series.labels.size(); ++i) {
        if (gnuplot_number(series.x[i]) == "NaN" || gnuplot_number(series.y[i]) == "NaN") continue;
        const bool is_right = place(series.x[i]) > 0.6;
        text_ += fmt::format("set label {} at {},{} {} offset char {},0.5 font ',10'\n", gnuplot_text(series.labels[i], 28),
                             gnuplot_number(series.x[i]), gnuplot_number(series.y[i]), is_right ? "right" : "left",
                             is_right ? -0.4 : 0.4);
      }
    }
  }

  void add_diagonal() {
    const double low = std::min(layout_.x.low, layout_.y.low), high = std::max(layout_.x.high, layout_.y.high);
    const double margin = layout_.is_log_x ? 0 : low < high ? 0.04 * (high - low) : 0.5 * std::max(std::abs(low), 1.0);
    const double factor = layout_.is_log_x ? 1.3 : 1;
    text_ += fmt::format("set size ratio 1\nset xrange [{0}:{1}]\nset yrange [{0}:{1}]\n", gnuplot_number(low / factor - margin),
                         gnuplot_number(high * factor + margin));
    plots_.push_back(fmt::format("x with lines {}", kDiagonalStyle));
  }

  void data(std::size_t index, const std::string& rows, const std::string& style) {
    text_ += fmt::format("$data{} << END\n{}END\n", index, rows);
    plots_.push_back(fmt::format("$data{} {}", index, style));
  }

  void add(const ChartSeries& series, std::size_t index, std::vector<double>& below) {
    if (series.y.empty()) return;
    if (layout_.chart.stacked) return add_area(series, index, below);
    const bool has_interval = !series.low.empty();
    std::string rows;
    for (std::size_t i = 0; i < series.y.size(); ++i) {
      if (series.spans) {
        rows += fmt::format("{} {} {} {} {} {}\n", gnuplot_number(series.low[i]), gnuplot_number(series.y[i]),
                            gnuplot_number(series.low[i]), gnuplot_number(series.high[i]), gnuplot_number(series.y[i] - 0.36),
                            gnuplot_number(series.y[i] + 0.36));
        continue;
      }
      rows += fmt::format("{} {}", gnuplot_number(series.x[i]), gnuplot_number(series.y[i]));
      const double middle = layout_.num_rows() > 0 ? series.x[i] : series.y[i];
      const auto end = [&](double value) { return gnuplot_number(std::isfinite(value) ? value : middle); };
      rows += has_interval ? fmt::format(" {} {}\n", end(series.low[i]), end(series.high[i])) : "\n";
    }
    if (series.spans) return data(index, rows, "with boxxyerror fs solid 0.9 noborder " + layout_.colour(index));
    const char* along = layout_.num_rows() > 0 ? "x" : "y";
    std::string style = series.points ? fmt::format("with points {} {}", layout_.colour(index), layout_.mark(index))
                        : layout_.num_rows() > 0
                            ? "with lines " + layout_.line(index)
                            : fmt::format("with linespoints {} {}", layout_.line(index), layout_.mark(index));
    if (has_interval) {
      style =
          fmt::format("with {}error{} {} {}", along, series.points ? "bars" : "lines", layout_.line(index), layout_.mark(index));
      if (series.points) style = fmt::format("with {}errorbars {} {} lw 1.2", along, layout_.colour(index), layout_.mark(index));
    }
    data(index, rows, style);
  }

  void add_area(const ChartSeries& series, std::size_t index, std::vector<double>& below) {
    below.resize(series.y.size(), 0.0);
    std::string rows;
    for (std::size_t i = 0; i < series.y.size(); ++i) {
      const double top = below[i] + (std::isfinite(series.y[i]) ? series.y[i] : 0);
      // One point alone has no area: it becomes a column.
      const bool is_alone = series.y.size() == 1;
      for (const double share : is_alone ? std::vector<double>{0.9, 1.1} : std::vector<double>{1}) {
        rows += fmt::format("{} {} {}\n", gnuplot_number(series.x[i] * share), gnuplot_number(below[i]), gnuplot_number(top));
      }
      below[i] = top;
    }
    data(index, rows, "with filledcurves fs solid 0.9 noborder " + layout_.colour(index));
  }

  ChartLayout layout_;
  std::string text_;
  std::vector<std::string> plots_;
};

bool is_file_name(const std::string& id) {
  return !id.empty() && id.size() <= 80 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

}  // namespace

std::string problem_of(const Chart& chart) {
  if (!is_file_name(chart.id)) {
    return fmt::format("has the id '{}'; it must be of lower-case letters, digits, '_' and '-'", shortened(chart.id, 60));
  }
  if (chart.stacked && !chart.rows.empty()) return "is stacked and has rows: rows are of bars (spans)";
  for (const ChartSeries& series : chart.series) {
    const std::size_t count = series.y.size();
    const auto fits = [count](std::size_t size) { return size == 0 || size == count; };
    const bool is_good =
        (series.spans && !chart.stacked ? fits(series.x.size()) && series.low.size() == count : series.x.size() == count) &&
        fits(series.low.size()) && series.low.size() == series.high.size() &&
        (series.labels.empty() || (series.labels.size() == count && series.x.size() == count));
    if (!is_good) return fmt::format("has a series '{}' whose lists differ in length", shortened(series.name, 60));
    if (chart.stacked && count != chart.series.front().y.size()) return "is stacked, but its series differ in length";
  }
  return {};
}

std::string gnuplot_script(const Chart& chart, ChartFormat format) {
  const std::string problem = problem_of(chart);
  TANDEM_CHECK(problem.empty(), fmt::format("chart '{}' {}", chart.title, problem));
  return Script(chart).finish(format);
}

}  // namespace tandem
