// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

#include "harness/report/chart.h"

namespace tandem {

/// As wide as still reads on a phone, where the drawing is scaled to the screen.
inline constexpr int kChartWidth = 480;
inline constexpr const char* kDiagonalStyle = "lc rgb '#808080' dt 2";

struct AxisRange {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  [[nodiscard]] bool is_empty() const { return !(low <= high); }
  /// Takes in what can be drawn.
  void add(double value, bool is_log);
};

/// What the parts of a chart's script share. Borrows the chart.
struct ChartLayout {
  explicit ChartLayout(const Chart& of);
  const Chart& chart;
  AxisRange x, y;
  bool is_log_x = false, is_log_y = false;

  [[nodiscard]] int num_rows() const { return static_cast<int>(chart.rows.size()); }
  /// Of series `index`, as gnuplot names them. Among rows a line is a limit and has no colour of its own.
  [[nodiscard]] static std::string colour(std::size_t index);
  [[nodiscard]] std::string mark(std::size_t index) const;
  [[nodiscard]] std::string line(std::size_t index) const;
};

/// A number for gnuplot; what is not finite is a gap.
[[nodiscard]] std::string gnuplot_number(double value);
/// Text between single quotes, in which nothing is replaced; at most `most` characters.
[[nodiscard]] std::string gnuplot_text(std::string_view text, std::size_t most);

/// Terminal, title (but for the page), and the names of the series in lines above the drawing: gnuplot's own key is no wider than
/// the drawing itself.
[[nodiscard]] std::string frame_script(const ChartLayout& layout, ChartFormat format);
/// Labels, tics and ranges.
[[nodiscard]] std::string axes_script(const ChartLayout& layout);

}  // namespace tandem
