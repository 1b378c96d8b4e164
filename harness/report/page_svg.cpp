// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include <fmt/format.h>

#include "harness/report/chart.h"
#include "harness/report/plain_text.h"

namespace tandem {
namespace {

void replace_all(std::string& text, std::string_view from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, from.size(), to);
}

void remove_all(std::string& text, std::string_view begin, std::string_view end) {
  for (std::size_t at = 0; (at = text.find(begin, at)) != std::string::npos;) {
    const std::size_t last = text.find(end, at + begin.size());
    text.erase(at, last == std::string::npos ? last : last + end.size() - at);
  }
}

// What is no text: many drawings share a page, so ids carry the chart's or go, and what was black takes the colour of the page's
// text.
std::string adapted(std::string markup, const std::string& id) {
  remove_all(markup, "<title>", "</title>");
  remove_all(markup, "<desc>", "</desc>");
  remove_all(markup, "<filter", "</filter>");
  replace_all(markup, "'black'", "'currentColor'");
  replace_all(markup, "'rgb(  0,   0,   0)'", "'currentColor'");
  replace_all(markup, "\"black\"", "\"currentColor\"");
  remove_all(markup, " id=\"gnuplot_", "\"");
  for (const char* shared : {"gpDot", "gpPt"}) replace_all(markup, shared, id + "-" + shared);
  return markup;
}

}  // namespace

std::string render_svg(const Chart& chart) {
  const std::string drawn = run_gnuplot(gnuplot_script(chart, ChartFormat::page), ChartFormat::page);
  const std::size_t box = drawn.find("viewBox");
  const std::size_t body = drawn.find('>', box) + 1;
  std::string out = fmt::format(
      "<svg {} role=\"img\" aria-label=\"{}\" xmlns=\"http://www.w3.org/2000/svg\" "
      "xmlns:xlink=\"http://www.w3.org/1999/xlink\">",
      drawn.substr(box, drawn.find('\n', box) - box), escaped(chart.title));
  for (std::size_t at = body; at < drawn.size();) {
    const std::size_t text = std::min(drawn.find("<text>", at), drawn.size());
    out += adapted(drawn.substr(at, text - at), chart.id);
    at = text == drawn.size() ? text : drawn.find("</text>", text);
    out += drawn.substr(text, at - text);
  }
  return out;
}

}  // namespace tandem
