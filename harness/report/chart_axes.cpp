// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "harness/report/chart_layout.h"
#include "harness/report/plain_text.h"

namespace tandem {
namespace {

constexpr double kRowCharacter = 7.2;
constexpr std::size_t kRowName = 32;

// Names of tics are formats as of printf.
std::string tic_name(std::string_view text, std::size_t most) {
  std::string out;
  for (const char c : gnuplot_text(text, most)) out.append(c == '%' ? 2 : 1, c);
  return out;
}

// Of a tic, from a thousand on with a prefix: 5k, 2M.
std::string tic_number(double value) {
  for (const auto& [factor, prefix] : {std::pair{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (value >= factor) return fmt::format("{:g}{}", value / factor, prefix);
  }
  return fmt::format("{:g}", value);
}

// Decades alone say little where there are few of them: then 2 and 5 have a tic, too.
std::string axis_script(const ChartLayout& layout, char which, const AxisRange& range, bool is_log) {
  std::string text;
  if (range.is_empty()) return text;
  if (!is_log) {
    if (range.high >= 1e4) text += fmt::format("set format {} '%.3s%c'\n", which);
    if (layout.num_rows() == 0 || range.low == range.high) return text;
    // Beside long names there is little room for numbers.
    const double step = std::pow(10, std::floor(std::log10((range.high - range.low) / 3)));
    const double steps = (range.high - range.low) / step;
    text += fmt::format("set {}tics {}\n", which, gnuplot_number(step * (steps > 15 ? 5 : steps > 6 ? 2 : 1)));
    return text;
  }
  text += fmt::format("set logscale {0}\nset format {0} '%g'\n", which);
  const int first = static_cast<int>(std::floor(std::log10(range.low))),
            last = static_cast<int>(std::ceil(std::log10(range.high)));
  const int every = 1 + (last - first) / 8;
  text += fmt::format("set {}tics (", which);
  for (int decade = first; decade <= last; ++decade) {
    for (const int factor : {1, 2, 5}) {
      if (factor > 1 && (last - first > 3 || decade == last)) continue;
      const double value = factor * std::pow(10, decade);
      const bool is_named = factor == 1 ? (decade - first) % every == 0 : last - first <= 1;
      text += fmt::format("{}'{}' {}", decade == first && factor == 1 ? "" : ", ", is_named ? tic_number(value) : "",
                          gnuplot_number(value));
    }
  }
  text += ")\n";
  return text;
}

// Bars and lanes fill the width; marks keep away from its ends.
std::string rows_range(const ChartLayout& layout) {
  const bool is_filled =
      std::all_of(layout.chart.series.begin(), layout.chart.series.end(), [](const ChartSeries& s) { return s.spans; });
  if (layout.is_log_x) return fmt::format("{}:{}", gnuplot_number(layout.x.low / 1.6), gnuplot_number(layout.x.high * 1.6));
  const double margin = layout.x.low == layout.x.high ? 0.5 * std::max(std::abs(layout.x.low), 1.0)
                        : is_filled                   ? 0
                                                      : 0.05 * (layout.x.high - layout.x.low);
  return fmt::format("{}:{}", gnuplot_number(layout.x.low - margin), gnuplot_number(layout.x.high + margin));
}

}  // namespace

std::string axes_script(const ChartLayout& layout) {
  std::string text = "set pointintervalbox 0\nset border lw 0.7\nset tics nomirror\nset grid lc rgb '#808080' dt (2,4) lw 0.6\n";
  text += fmt::format("set xlabel {}\n", gnuplot_text(layout.chart.x_label, 52));
  if (layout.num_rows() == 0) text += fmt::format("set ylabel {}\n", gnuplot_text(layout.chart.y_label, 34));
  text += axis_script(layout, 'x', layout.x, layout.is_log_x);
  if (layout.num_rows() == 0) text += axis_script(layout, 'y', layout.y, layout.is_log_y);
  if (layout.num_rows() > 0) {
    std::size_t longest = 0;
    for (const std::string& row : layout.chart.rows) longest = std::max(longest, shortened(row, kRowName).size());
    text += fmt::format("set lmargin at screen {:.4f}\n", (14 + kRowCharacter * static_cast<double>(longest)) / kChartWidth);
    text += fmt::format("set yrange [{}:-0.5]\nset grid noytics\nset ytics scale 0 (", layout.num_rows() - 0.5);
    for (int i = 0; i < layout.num_rows(); ++i) {
      text += fmt::format("{}{} {}", i == 0 ? "" : ", ", tic_name(layout.chart.rows[static_cast<std::size_t>(i)], kRowName), i);
    }
    text += ")\n";
    if (!layout.x.is_empty()) text += fmt::format("set xrange [{}]\n", rows_range(layout));
  }
  if (!layout.is_log_y && layout.y.low < 0 && layout.num_rows() == 0) text += "set xzeroaxis lt 1 lc rgb 'black' lw 0.7\n";
  if (layout.chart.stacked) {
    const bool is_alone = layout.x.low == layout.x.high && layout.x.low > 0;
    text += "set yrange [*<0:0<*]\nset xrange [";
    text += is_alone ? fmt::format("{}:{}]\n", gnuplot_number(layout.x.low / 1.5), gnuplot_number(layout.x.low * 1.5))
                     : "*:*] noextend\n";
  }
  if (layout.num_rows() == 0 && !layout.chart.stacked && !layout.chart.diagonal)
    text += "set offsets graph 0.03, graph 0.03, graph 0.04, graph 0.04\n";
  return text;
}

}  // namespace tandem
