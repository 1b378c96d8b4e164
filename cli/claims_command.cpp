// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/scaling_report.h"
#include "cli/terminal.h"
#include "core/error.h"
#include "core/io/json_field.h"
#include "core/nearest_name.h"
#include "suites/claims.h"
#include "suites/timing.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kLineWidth = 110;  // of running text on a terminal
constexpr const char* kReportTitle = "Claims of the article";

struct ClaimsArguments {
  std::vector<std::string> ids;
  std::string json;
  bool quick = false, list = false;
  std::uint64_t seed = 1;
};

// What became of a claim; no result: it could not be evaluated.
struct Evaluated {
  Claim claim;
  std::optional<ClaimResult> result;
  std::string problem;
  double seconds = 0;
};

std::vector<Claim> chosen(const ClaimsArguments& arguments) {
  std::vector<Claim> all = all_claims(arguments.quick ? ClaimEffort::quick : ClaimEffort::usual);
  if (arguments.ids.empty()) return all;
  std::vector<std::string> known;
  for (const Claim& claim : all) known.push_back(claim.id);
  for (const std::string& id : arguments.ids) {
    if (std::find(known.begin(), known.end(), id) != known.end()) continue;
    const std::optional<std::string> nearest = nearest_name(id, known);
    throw InputError(fmt::format("there is no claim '{}'{}; tandem claims --list shows them", id,
                                 nearest ? fmt::format(", did you mean '{}'?", *nearest) : ""));
  }
  std::erase_if(all, [&](const Claim& claim) {
    return std::find(arguments.ids.begin(), arguments.ids.end(), claim.id) == arguments.ids.end();
  });
  return all;
}

std::vector<Evaluated> evaluate_all(const ClaimsArguments& arguments, const std::atomic<bool>& stop) {
  std::vector<Claim> claims = chosen(arguments);
  RunContext context;
  context.seed = arguments.seed;
  ProgressLine progress;
  std::vector<Evaluated> all;
  for (Claim& claim : claims) {
    if (stop) break;
    progress.show(std::ssize(all), std::ssize(claims), claim.id);
    const auto begin = std::chrono::steady_clock::now();
    Evaluated now{.claim = std::move(claim), .result = {}, .problem = {}};
    try {
      now.result = evaluate(now.claim, context);
    } catch (const std::exception& error) {
      now.problem = error.what();
    }
    now.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    all.push_back(std::move(now));
  }
  progress.clear();
  return all;
}

std::string verdict_of(const Evaluated& entry) {
  return entry.result ? std::string(name(entry.result->verdict)) : std::string("not evaluated");
}

std::string reason_of(const Evaluated& entry) { return entry.result ? entry.result->reason : entry.problem; }

// Heads and rows of the table: of each claim its own figure, the first.
std::vector<std::vector<std::string>> table_of(const std::vector<Evaluated>& all, bool with_text) {
  std::vector<std::vector<std::string>> rows = {{"claim", "section", "figure", "stated", "predicted", "measured", "verdict"}};
  if (with_text) rows.front().insert(rows.front().end(), {"statement", "reason", "not measured", "in depth"});
  for (const Evaluated& entry : all) {
    const ClaimFigure figure = entry.result ? entry.result->figures.front() : ClaimFigure{};
    rows.push_back({entry.claim.id, entry.claim.section, entry.result ? figure.what : "-", say_figure(figure.stated, figure.unit),
                    say_figure(figure.predicted, figure.unit), say_figure(figure.measured, figure.unit), verdict_of(entry)});
    if (!with_text) continue;
    const std::string elsewhere = entry.result && !entry.result->not_measured.empty() ? entry.result->not_measured : "-";
    rows.back().insert(rows.back().end(), {entry.claim.stated, reason_of(entry), elsewhere, entry.claim.command});
  }
  return rows;
}

void print_table(const std::vector<std::vector<std::string>>& rows, TableStyle style) {
  TextTable table(rows.front());
  for (std::size_t i = 1; i < rows.size(); ++i) table.add(rows[i]);
  fmt::print("{}", table.render(style));
}

// `text` in lines of at most kLineWidth, all of them behind `indent` but the first, which stands behind `label`.
std::string paragraph(const std::string& label, const std::string& text) {
  const std::string indent(label.size(), ' ');
  std::string lines = label;
  std::size_t width = label.size();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (width + end - at > kLineWidth) {
      lines += "\n" + indent;
      width = indent.size();
    }
    lines += text.substr(at, end - at) + " ";
    width += end - at + 1;
    at = end + 1;
  }
  return lines + "\n";
}

void print_in_full(const Evaluated& entry) {
  fmt::print("\n{} (section {}): {}\n", entry.claim.id, entry.claim.section, verdict_of(entry));
  fmt::print("{}{}", paragraph("  stated      ", entry.claim.stated), paragraph("  found       ", reason_of(entry)));
  if (entry.result && !entry.result->not_measured.empty()) {
    fmt::print("{}", paragraph("  not here    ", entry.result->not_measured));
  }
  fmt::print("  in depth    {}\n", entry.claim.command);
  if (!entry.result) return;
  for (const ClaimFigure& figure : entry.result->figures) {
    fmt::print("              {}: {} stated, {} predicted, {} measured\n", figure.what, say_figure(figure.stated, figure.unit),
               say_figure(figure.predicted, figure.unit), say_figure(figure.measured, figure.unit));
  }
}

std::string tally(const std::vector<Evaluated>& all) {
  std::string text;
  for (const ClaimVerdict verdict :
       {ClaimVerdict::holds, ClaimVerdict::holds_within_limits, ClaimVerdict::imprecise, ClaimVerdict::does_not_hold}) {
    const auto count = std::count_if(all.begin(), all.end(),
                                     [&](const Evaluated& entry) { return entry.result && entry.result->verdict == verdict; });
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, name(verdict));
  }
  const auto failed = std::count_if(all.begin(), all.end(), [](const Evaluated& entry) { return !entry.result; });
  return failed == 0 ? text : text + fmt::format(", {} not evaluated", failed);
}

ReportSection section_of(const std::vector<Evaluated>& all) {
  ReportSection section{.title = kReportTitle,
                        .text = tally(all) +
                                ". A verdict follows from the figures by conditions that stand beside them "
                                "(docs/claims.md).",
                        .charts = {},
                        .table = table_of(all, true)};
  Chart chart{.id = "claims-predicted-measured",
              .title = "Figures of the claims: measured here over predicted by formula",
              .caption = "Every figure that has both, in its own unit; on the line they agree.",
              .x_label = "predicted",
              .y_label = "measured",
              .log_x = true,
              .log_y = true,
              .diagonal = true,
              .series = {}};
  ChartSeries points{.name = "figures", .x = {}, .y = {}, .points = true};
  for (const Evaluated& entry : all) {
    if (!entry.result) continue;
    for (const ClaimFigure& figure : entry.result->figures) {
      if (!(figure.predicted > 0 && figure.measured > 0)) continue;
      points.x.push_back(figure.predicted);
      points.y.push_back(figure.measured);
    }
  }
  chart.series.push_back(std::move(points));
  if (!chart.series.front().x.empty()) section.charts.push_back(std::move(chart));
  return section;
}

Json figure_or_null(double value) { return std::isnan(value) ? Json() : number_to_json(value); }

Json claim_json(const Evaluated& entry) {
  Json json = {{"claim", entry.claim.id},      {"section", entry.claim.section},
               {"stated", entry.claim.stated}, {"verdict", verdict_of(entry)},
               {"reason", reason_of(entry)},   {"command", entry.claim.command},
               {"seconds", entry.seconds},     {"not_measured", ""},
               {"figures", Json::array()},     {"conditions", Json::array()}};
  for (const ClaimCondition& condition : entry.claim.conditions) {
    json["conditions"].push_back({{"figure", condition.figure},
                                  {"of", condition.of == ClaimCondition::Of::measured ? "measured" : "predicted"},
                                  {"relation", std::string(symbol(condition.relation))},
                                  {"limit", condition.limit},
                                  {"otherwise", std::string(name(condition.otherwise))},
                                  {"because", condition.because}});
  }
  if (!entry.result) return json;
  json["not_measured"] = entry.result->not_measured;
  for (const ClaimFigure& figure : entry.result->figures) {
    json["figures"].push_back({{"key", figure.key},
                               {"what", figure.what},
                               {"unit", figure.unit},
                               {"stated", figure_or_null(figure.stated)},
                               {"predicted", figure_or_null(figure.predicted)},
                               {"measured", figure_or_null(figure.measured)}});
  }
  return json;
}

std::string as_json(const ClaimsArguments& arguments, const std::vector<Evaluated>& all) {
  Json json = {{"claims_version", 1}, {"quick", arguments.quick}, {"seed", arguments.seed}, {"claims", Json::array()}};
  for (const Evaluated& entry : all) json["claims"].push_back(claim_json(entry));
  return with_sections(std::move(json), {section_of(all)});
}

int claims_action(const CommandLine& line, const ClaimsArguments& arguments) {
  if (arguments.list) {
    for (const Claim& claim : chosen(arguments)) fmt::print("{} {:<4} {}\n", claim.id, claim.section, claim.stated);
    return kGood;
  }
  require_writable(arguments.json, "--json");
  const std::size_t asked = chosen(arguments).size();
  if (const std::optional<std::string> busy = too_busy_to_time()) {
    fmt::print(stderr, "tandem: {}; measured times may be off\n", *busy);
  }
  const std::vector<Evaluated> all = evaluate_all(arguments, line.stop);
  if (arguments.json != "-") {
    const bool terminal = output_is_terminal();
    print_table(table_of(all, !terminal), output_style());
    if (terminal) {
      for (const Evaluated& entry : all) print_in_full(entry);
      fmt::print("\n{}\n", tally(all));
    }
  }
  if (!arguments.json.empty()) write_output(arguments.json, as_json(arguments, all));
  if (all.size() < asked) {
    fmt::print(stderr, "tandem: interrupted after {} of {} claims\n", all.size(), asked);
    return kInterrupted;
  }
  const bool whole = std::all_of(all.begin(), all.end(), [](const Evaluated& entry) { return entry.result.has_value(); });
  return whole ? kGood : kRunBroke;
}

}  // namespace

void add_claims_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("claims", "The article's claims: stated, predicted, measured here, and the verdict");
  const auto arguments = std::make_shared<ClaimsArguments>();
  command->add_option("ID", arguments->ids, "C01 to C21; all without");
  command->add_flag("--list", arguments->list, "say what each states, measure nothing");
  command->add_flag("--quick", arguments->quick, "smaller sizes and fewer trials; the same conditions");
  command->add_option("--seed", arguments->seed, "of parameters, data, dropout and faults")
      ->capture_default_str()
      ->check(whole_number);
  command->add_option("--json", arguments->json,
                      "write all figures, conditions and verdicts, for tandem report; - is standard output");
  command->footer("Exit status 0 when all were evaluated, whatever the verdicts.\nExample:\n  tandem claims C13 C14 --quick");
  command->callback([&line, arguments] { line.action = [&line, arguments] { return claims_action(line, *arguments); }; });
}

}  // namespace tandem
