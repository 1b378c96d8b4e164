// SPDX-License-Identifier: Apache-2.0
#include "harness/text_table.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

bool looks_like_a_number(const std::string& cell) {
  return cell == "-" || (!cell.empty() && std::isdigit(static_cast<unsigned char>(cell.front())) != 0);
}

std::string aligned_line(const std::vector<std::string>& row, const std::vector<std::size_t>& widths,
                         const std::vector<bool>& right) {
  std::string line;
  for (std::size_t i = 0; i < row.size(); ++i) {
    line += right[i] ? fmt::format("{:>{}}", row[i], widths[i]) : fmt::format("{:<{}}", row[i], widths[i]);
    if (i + 1 < row.size()) line += "  ";
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string tabbed_line(const std::vector<std::string>& row) {
  std::string line;
  for (const std::string& cell : row) line += (&cell == row.data() ? "" : "\t") + cell;
  return line + "\n";
}

// Three significant digits of a number below 1000.
std::string three_digits(double value) {
  const int decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}", value, decimals);
}

}  // namespace

void TextTable::add(std::vector<std::string> row) {
  TANDEM_CHECK(row.size() == heading_.size(), fmt::format("a row has {} cells, the heading {}", row.size(), heading_.size()));
  rows_.push_back(std::move(row));
}

std::string TextTable::render(TableStyle style) const {
  std::string text;
  if (style == TableStyle::plain) {
    text = tabbed_line(heading_);
    for (const auto& row : rows_) text += tabbed_line(row);
    return text;
  }
  std::vector<std::size_t> widths;
  std::vector<bool> right;
  for (std::size_t i = 0; i < heading_.size(); ++i) {
    std::size_t width = heading_[i].size();
    for (const auto& row : rows_) width = std::max(width, row[i].size());
    widths.push_back(width);
    right.push_back(!rows_.empty() && std::ranges::all_of(rows_, [i](const auto& row) { return looks_like_a_number(row[i]); }));
  }
  text = aligned_line(heading_, widths, right);
  for (const auto& row : rows_) text += aligned_line(row, widths, right);
  return text;
}

std::string human_bytes(std::int64_t bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1023.5 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{} {}", three_digits(value), kUnits[unit]);
}

std::string human_count(double value) {
  constexpr std::array kPrefixes = {"", "k", "M", "G", "T", "P"};
  if (!std::isfinite(value)) return "-";
  std::size_t prefix = 0;
  for (; std::abs(value) >= 999.5 && prefix + 1 < kPrefixes.size(); ++prefix) value /= 1000;
  return fmt::format("{}{}", three_digits(value), kPrefixes[prefix]);
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  if (seconds >= 0.9995) return fmt::format("{} s", three_digits(seconds));
  if (seconds >= 0.9995e-3) return fmt::format("{} ms", three_digits(seconds * 1e3));
  return fmt::format("{} us", three_digits(seconds * 1e6));
}

std::string human_share(double share) { return std::isfinite(share) ? fmt::format("{:.1f} %", share * 100) : "-"; }

}  // namespace tandem
