// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/json_field.h"
#include "core/shipped_files.h"
#include "optimized/scaling/published_figures_test_support.h"

namespace tandem {
namespace {

PublishedFigure figure_from(const JsonField& field) {
  PublishedFigure figure;
  figure.id = field["id"].text();
  figure.source = field["source"].text();
  figure.device = field["device"].text();
  for (const auto& [key, value] : field.value().items()) {
    if (key == "suspect") {
      figure.suspect = value.get<bool>();
    } else if (key == "from_memory") {
      figure.from_memory = value.get<bool>();
    } else if (value.is_number()) {
      figure.numbers[key] = value.get<double>();
    } else if (value.is_string() && key != "id" && key != "source" && key != "device") {
      figure.words[key] = value.get<std::string>();
    }
  }
  if (!field.has("points")) return figure;
  for (const JsonField& point : field["points"].elements()) {
    figure.points.emplace_back(point.at(0).amount(), point.at(1).amount());
  }
  return figure;
}

}  // namespace

std::vector<PublishedFigure> published_figures(const std::string& kind) {
  const NamedText file = read_file_or_shipped("published figures", "published", "figures");
  const nlohmann::json parsed = parse_json_object(file.text, file.source_name);
  const JsonField root(file.source_name, parsed);
  root.require_format("tandem-published-figures", 1);
  if (kind == "format" || kind == "version" || !root.has(kind.c_str())) {
    throw InputError(fmt::format("{}: no figures of '{}'; there are collectives, matmuls, checkpoints and reliability",
                                 file.source_name, kind));
  }
  std::vector<PublishedFigure> figures;
  for (const JsonField& field : root[kind.c_str()].elements()) figures.push_back(figure_from(field));
  return figures;
}

}  // namespace tandem
