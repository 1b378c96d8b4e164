// SPDX-License-Identifier: Apache-2.0
#include "harness/report/html.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include "harness/report/page_style.h"
#include "harness/report/plain_text.h"

namespace tandem {
namespace {

bool is_number(std::string_view cell) {
  if (cell.starts_with('-') || cell.starts_with('+') || cell.starts_with("<")) cell.remove_prefix(1);
  if (cell.empty()) return true;
  return cell.size() <= 40 && cell.front() >= '0' && cell.front() <= '9';
}

const char* class_of(std::string_view cell) {
  constexpr std::array<std::string_view, 6> kGood = {"pass", "faster", "fewer", "fixed", "holds", "holds within limits"};
  constexpr std::array<std::string_view, 7> kBad = {"fail", "invalid", "slower", "more", "broken", "imprecise", "does not hold"};
  if (std::find(kGood.begin(), kGood.end(), cell) != kGood.end()) return "good";
  if (std::find(kBad.begin(), kBad.end(), cell) != kBad.end()) return "bad";
  if (is_number(cell)) return "number";
  if (cell.size() > 48) return "long";
  return cell.find(' ') == std::string_view::npos || cell.size() <= 24 ? "name" : "";
}

std::string cell_markup(const std::string& cell) {
  const std::string style = class_of(cell);
  return fmt::format("<td{}>{}</td>", style.empty() ? "" : fmt::format(" class=\"{}\"", style), escaped(cell));
}

}  // namespace

void HtmlPage::begin_part(const std::string& title) {
  ++parts_;
  body_ += fmt::format("<h2 id=\"part-{}\">{}</h2>\n", parts_, escaped(title));
  contents_ += fmt::format("<li><a href=\"#part-{}\">{}</a></li>\n", parts_, escaped(title));
}

void HtmlPage::paragraph(const std::string& text, const std::string& style_class) {
  if (text.empty()) return;
  body_ += fmt::format("<p{}>{}</p>\n", style_class.empty() ? "" : fmt::format(" class=\"{}\"", style_class), escaped(text));
}

void HtmlPage::table(const std::vector<std::vector<std::string>>& rows, const std::string& style_class) {
  if (rows.empty()) return;
  // A box that scrolls must be within reach of the keyboard.
  body_ += fmt::format("<div class=\"scroll\" tabindex=\"0\"><table class=\"rows {}\">\n<thead><tr>", style_class);
  for (const std::string& head : rows.front()) body_ += fmt::format("<th scope=\"col\">{}</th>", escaped(head));
  body_ += "</tr></thead>\n<tbody>\n";
  for (std::size_t i = 1; i < rows.size(); ++i) {
    body_ += "<tr>";
    for (const std::string& cell : rows[i]) body_ += cell_markup(cell);
    body_ += "</tr>\n";
  }
  body_ += rows.size() == 1 ? "<tr><td>nothing</td></tr>\n</tbody></table></div>\n" : "</tbody></table></div>\n";
}

void HtmlPage::begin_details(const std::string& summary, bool is_open) {
  body_ += fmt::format("<details{}><summary>{}</summary>\n", is_open ? " open=\"open\"" : "", escaped(summary));
}

void HtmlPage::end_details() { body_ += "</details>\n"; }

void HtmlPage::charts(const std::vector<Chart>& charts) {
  if (charts.empty()) return;
  body_ += "<div class=\"charts\">\n";
  for (const Chart& chart : charts) {
    body_ += fmt::format("<figure><h3>{}</h3>\n{}\n", escaped(chart.title), render_svg(chart));
    if (!chart.caption.empty()) body_ += fmt::format("<figcaption>{}</figcaption>", escaped(chart.caption));
    body_ += "</figure>\n";
  }
  body_ += "</div>\n";
}

void HtmlPage::section(const ReportSection& section) {
  begin_part(section.title);
  paragraph(section.text);
  charts(section.charts);
  table(section.table);
}

std::string HtmlPage::finish(const std::string& title) && {
  return fmt::format(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n<meta charset=\"utf-8\" />\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\" />\n<title>{0}</title>\n<style>{1}</style>\n"
      "</head>\n<body>\n<header><h1>{0}</h1></header>\n<nav aria-label=\"Contents\"><ul>\n{2}</ul></nav>\n<main>\n{3}</main>\n"
      "</body>\n</html>\n",
      escaped(title), kPageStyle, contents_, std::move(body_));
}

}  // namespace tandem
