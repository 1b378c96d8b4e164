// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "harness/report/chart_layout.h"
#include "harness/report/plain_text.h"

namespace tandem {
namespace {

// Of the colours of Okabe and Ito (2008) those with a contrast of 3 against white and against the dark page.
constexpr std::array kColours = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#9A7D0A", "#808080"};
constexpr std::array kMarks = {7, 5, 9, 13, 11, 15, 6, 4};
constexpr int kKeyMargin = 12, kKeySample = 26, kKeyLine = 19;
constexpr double kKeyCharacter = 7.4;

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  return text.replace(text.find(from), from.size(), to);
}

struct Key {
  std::string name;
  std::size_t series = 0;  ///< beyond the last one: the diagonal
  double left = 0;         ///< pixels
  int line = 0;
};

std::vector<Key> keys_of(const ChartLayout& layout) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < layout.chart.series.size(); ++i) {
    const ChartSeries& series = layout.chart.series[i];
    if (!series.name.empty() && !series.y.empty()) keys.push_back({shortened(series.name, 56), i});
  }
  if (layout.chart.diagonal) keys.push_back({"equal", layout.chart.series.size()});
  if (keys.size() < 2) return {};
  double left = kKeyMargin;
  int line = 0;
  for (Key& key : keys) {
    const double width = kKeySample + kKeyCharacter * static_cast<double>(key.name.size()) + 12;
    if (left > kKeyMargin && left + width > kChartWidth) {
      left = kKeyMargin;
      ++line;
    }
    key.left = left;
    key.line = line;
    left += width;
  }
  return keys;
}

std::string key_script(const ChartLayout& layout, const Key& key, double top, int height) {
  const auto screen = [&](double x, double y) { return fmt::format("screen {:.4f},{:.4f}", x / kChartWidth, 1 - y / height); };
  const double middle = top + kKeyLine * (key.line + 0.5);
  std::string text = fmt::format("set label {} at {} left\n", gnuplot_text(key.name, 56), screen(key.left + kKeySample, middle));
  if (key.series == layout.chart.series.size()) {
    text += fmt::format("set arrow from {} to {} nohead {}\n", screen(key.left, middle), screen(key.left + 20, middle),
                        kDiagonalStyle);
    return text;
  }
  const ChartSeries& series = layout.chart.series[key.series];
  if (series.spans || layout.chart.stacked) {
    text += fmt::format("set object rectangle from {} to {} fs solid 0.9 noborder {}\n", screen(key.left, middle - 5),
                        screen(key.left + 20, middle + 5), replaced(layout.colour(key.series), "lc", "fc"));
    return text;
  }
  if (!series.points) {
    text += fmt::format("set arrow from {} to {} nohead {}\n", screen(key.left, middle), screen(key.left + 20, middle),
                        layout.line(key.series));
  }
  if (series.points || layout.num_rows() == 0) {
    text += fmt::format("set label '' at {} point {} {}\n", screen(key.left + 10, middle), layout.colour(key.series),
                        layout.mark(key.series));
  }
  return text;
}

bool can_draw(double value, bool is_log) { return std::isfinite(value) && (!is_log || value > 0); }

}  // namespace

void AxisRange::add(double value, bool is_log) {
  if (!can_draw(value, is_log)) return;
  low = std::min(low, value);
  high = std::max(high, value);
}

ChartLayout::ChartLayout(const Chart& of) : chart(of) {
  const bool log_y = chart.log_y && !chart.stacked;
  for (const ChartSeries& series : chart.series) {
    for (std::size_t i = 0; i < series.y.size(); ++i) {
      const double left = series.spans && !chart.stacked ? series.low[i] : series.x[i];
      const double height = chart.stacked && !std::isfinite(series.y[i]) ? 0 : series.y[i];
      if (!can_draw(left, chart.log_x) || !can_draw(height, log_y)) continue;
      x.add(left, chart.log_x);
      y.add(height, log_y);
      if (series.low.empty() || (chart.rows.empty() && !series.spans)) continue;
      x.add(series.low[i], chart.log_x);
      x.add(series.high[i], chart.log_x);
    }
  }
  // Within half a decade there is nothing that a logarithm shows better.
  is_log_x = chart.log_x && !x.is_empty() && x.high >= 5 * x.low;
  is_log_y = log_y && !y.is_empty() && y.high >= 5 * y.low;
  if (chart.diagonal) is_log_x = is_log_y = chart.log_x && log_y && (is_log_x || is_log_y);
}

std::string ChartLayout::colour(std::size_t index) { return fmt::format("lc rgb '{}'", kColours[index % kColours.size()]); }

std::string ChartLayout::mark(std::size_t index) const {
  const bool is_small = num_rows() > 0 || chart.series[index].y.size() > 60;
  return fmt::format("pt {} ps {}", kMarks[index % kMarks.size()], is_small ? 0.4 : 0.6);
}

std::string ChartLayout::line(std::size_t index) const {
  if (num_rows() > 0) return "lc rgb 'black' lw 1.2";
  return fmt::format("{} lw 1.6 dt {}", colour(index), 1 + index / kColours.size());
}

std::string gnuplot_number(double value) { return std::isfinite(value) ? fmt::format("{:.9g}", value) : "NaN"; }

std::string gnuplot_text(std::string_view text, std::size_t most) {
  std::string out = "'";
  for (const char c : shortened(text, most)) out.append(c == '\'' ? 2 : 1, c);
  return out + "'";
}

std::string frame_script(const ChartLayout& layout, ChartFormat format) {
  const std::vector<Key> names = keys_of(layout);
  const int title_height = format == ChartFormat::page ? 4 : 34;
  const int keys_height = 8 + (names.empty() ? 0 : kKeyLine * (names.back().line + 1));
  const int rows_height = std::max(17 * layout.num_rows(), std::min(32 * layout.num_rows(), 130));
  const int plot_height = layout.num_rows() > 0 ? rows_height + 54 : layout.chart.diagonal ? 400 : 280;
  const int height = plot_height + keys_height + title_height;
  const auto from_top = [height](int pixels) { return fmt::format("{:.4f}", 1 - pixels / static_cast<double>(height)); };
  std::string text = "set encoding utf8\n";
  switch (format) {
    case ChartFormat::page:
      text += fmt::format("set terminal svg size {},{} dynamic noenhanced font 'sans-serif,13'\n", kChartWidth, height);
      break;
    case ChartFormat::svg:
      text +=
          fmt::format("set terminal svg size {},{} noenhanced font 'sans-serif,13' background '#FFFFFF'\n", kChartWidth, height);
      break;
    case ChartFormat::png:  // three pixels for each of the SVG; cairo takes a point for 4/3 of a pixel
      text += fmt::format(
          "set terminal pngcairo size {},{} noenhanced font 'sans,13' fontscale 2.25 linewidth 3 pointscale 3 "
          "background '#FFFFFF'\n",
          3 * kChartWidth, 3 * height);
      break;
    case ChartFormat::pdf:
      text += fmt::format("set terminal pdfcairo size {:.3f}in,{:.3f}in noenhanced font 'sans,13' fontscale 0.75\n",
                          kChartWidth / 72.0, height / 72.0);
      break;
  }
  if (format != ChartFormat::page) {
    text += fmt::format("set label {} at screen 0.5,{} center font ',15'\n", gnuplot_text(layout.chart.title, 50), from_top(18));
  }
  text += fmt::format("set tmargin at screen {}\n", from_top(title_height + keys_height));
  text += "set key off\n";
  for (const Key& key : names) text += key_script(layout, key, title_height, height);
  return text;
}

}  // namespace tandem
