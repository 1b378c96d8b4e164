// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <charconv>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/scaling_report.h"
#include "cli/terminal.h"
#include "core/config.h"
#include "core/error.h"
#include "harness/text_table.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kTwinRanks = 8;

struct Arguments {
  std::string model, cluster;
  int devices = 0;
  std::int64_t global_batch = 0, sequence = 0;
  std::string precision;
  std::vector<std::string> schedules, most;
  int top = 5;
  std::string json, write;
  const std::atomic<bool>* stop = nullptr;
};

// "context=1"
std::pair<std::string, int> limit_of(const std::string& text) {
  const std::size_t end = text.find('=');
  int value = 0;
  const char* const last = text.data() + text.size();
  const bool good = end != std::string::npos && std::from_chars(text.data() + end + 1, last, value).ptr == last;
  if (!good || value < 1) throw InputError(fmt::format("--most {}: write AXIS=NUMBER, such as context=1", text));
  return {text.substr(0, end), value};
}

PlanQuery query_of(const Arguments& arguments) {
  PlanQuery query;
  query.model = read_model_shape(arguments.model);
  query.cluster = read_cluster(arguments.cluster);
  query.devices = arguments.devices;
  query.global_batch_rows = arguments.global_batch;
  query.sequence = arguments.sequence > 0 ? arguments.sequence : query.model.sequence;
  if (query.global_batch_rows == 0) query.global_batch_rows = usual_batch_rows(query.model, query.sequence);
  query.precision = arguments.precision.empty() ? usual_precision(query.cluster) : arguments.precision;
  query.schedules = arguments.schedules;
  for (const std::string& text : arguments.most) {
    if (!query.most.insert(limit_of(text)).second) throw InputError(fmt::format("--most {}: the axis has a limit already", text));
  }
  query.top = arguments.top;
  query.stop = arguments.stop;
  return query;
}

CellRows rows_of(const std::vector<PlanCandidate>& candidates) {
  CellRows rows = {{"#", "layout", "schedule", "rows", "recompute", "zero", "sequence", "step", "tokens/s", "MFU", "memory",
                    "compute", "communication", "bubble", "goodput", "against the one before"}};
  for (const PlanCandidate& candidate : candidates) {
    const TrainingPlan& plan = candidate.workload.plan;
    const StepEstimate& estimate = candidate.estimate;
    const StepShares shares = shares_of(estimate);
    rows.push_back({fmt::format("{}", rows.size()), degrees_text(plan.parallel), schedule_text(plan),
                    fmt::format("{} x {}", micro_batch_rows(plan), plan.batch.micro_batches), plan.recompute.mode,
                    fmt::format("{}", plan.zero_stage), plan.sequence_parallel ? "parallel" : "-",
                    human_seconds(estimate.step_seconds), human_count(estimate.tokens_per_second),
                    human_share(estimate.model_flops_utilization), memory_of_limit(estimate.memory), human_share(shares.compute),
                    human_share(shares.communication), human_share(shares.bubble), human_share(estimate.goodput),
                    candidate.why_not.empty() ? "-" : candidate.why_not});
  }
  return rows;
}

std::string verdict_of(const PlanPath& path) {
  if (path.result.estimate.step_seconds == 0) return path.result.why_not;
  std::string text = human_seconds(path.result.estimate.step_seconds);
  if (path.over_best > 0) text += fmt::format(", {:.2f} x the best: {}", path.over_best, path.result.why_not);
  return text;
}

void print_path(const PlanPath& path) {
  fmt::print("\n{}: {}\n", path.name, verdict_of(path));
  if (path.steps.empty()) return;
  TextTable table({"step", "rule", "choice", "memory"});
  for (const PlanStep& step : path.steps) {
    table.add({fmt::format("{}", &step - path.steps.data() + 1), step.rule, step.choice, memory_of_limit(step.memory)});
  }
  fmt::print("{}", table.render(output_style()));
}

void print(const PlanQuery& query, const PlanReport& report) {
  fmt::print("{} ({} parameters) on {} devices of {}: {} rows of {} tokens a step, {}\n", query.model.name,
             human_count(num_parameters(query.model)), query.devices, query.cluster.name, query.global_batch_rows, query.sequence,
             query.precision);
  if (report.best.empty()) {
    fmt::print("no layout fits; the one that needs least: {}\n", report.nearest_miss);
  } else {
    fmt::print("{}", rendered(rows_of(report.best), output_style()));
  }
  for (const PlanPath& path : report.paths) print_path(path);
  fmt::print("\n{} layouts; {} simulated, {} found out of memory, no other can be faster; {}\n", report.candidates,
             report.simulated, report.out_of_memory, human_seconds(report.seconds));
}

Json candidate_json(const PlanCandidate& candidate) {
  Json json = estimate_json(candidate.estimate);
  json["plan"] = plan_json(candidate.workload.plan);
  json["why_not"] = candidate.why_not;
  return json;
}

Json path_json(const PlanPath& path) {
  Json steps = Json::array();
  for (const PlanStep& step : path.steps) {
    steps.push_back({{"rule", step.rule},
                     {"choice", step.choice},
                     {"memory_bytes", step.memory.total()},
                     {"limit_bytes", step.memory.limit}});
  }
  return {{"name", path.name}, {"steps", steps}, {"result", candidate_json(path.result)}, {"over_best", path.over_best}};
}

// For the margin of a chart.
std::string short_degrees(const ParallelDegrees& degrees) {
  std::string text;
  const auto add = [&text](char axis, int degree) {
    if (degree > 1) text += fmt::format("{}{}{}", text.empty() ? "" : " ", axis, degree);
  };
  add('t', degrees.tensor);
  add('p', degrees.pipeline);
  add('c', degrees.context);
  add('d', degrees.data);
  add('e', degrees.expert);
  return text.empty() ? "one device" : text;
}

Chart parts_chart(const PlanReport& report) {
  Chart chart{.id = "plan_parts",
              .title = "Where the step of the best layouts goes",
              .caption =
                  "Seconds of a step by what they are spent on, the fastest layout first; ranks: t tensor, p pipeline, c "
                  "context, d data, e expert.",
              .x_label = "seconds",
              .y_label = "",
              .series = {}};
  const std::vector<std::pair<const char*, double StepShares::*>> parts = {{"compute", &StepShares::compute},
                                                                           {"communication", &StepShares::communication},
                                                                           {"bubble", &StepShares::bubble},
                                                                           {"optimizer", &StepShares::optimizer},
                                                                           {"data", &StepShares::data}};
  for (const auto& [name, part] : parts) chart.series.push_back({.name = name, .x = {}, .y = {}, .spans = true});
  for (const PlanCandidate& candidate : report.best) {
    const StepShares shares = shares_of(candidate.estimate);
    const auto row = static_cast<double>(chart.rows.size());
    chart.rows.push_back(short_degrees(candidate.workload.plan.parallel));
    double begin = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const double seconds = shares.*parts[i].second * candidate.estimate.step_seconds;
      ChartSeries& series = chart.series[i];
      series.x.push_back(begin + seconds / 2);
      series.y.push_back(row);
      series.low.push_back(begin);
      series.high.push_back(begin += seconds);
    }
  }
  std::erase_if(chart.series, [](const ChartSeries& series) { return series.low == series.high; });  // nothing of it anywhere
  return chart;
}

ReportSection section_of(const PlanQuery& query, const PlanReport& report) {
  ReportSection section{.title = fmt::format("Plan: {} on {} devices of {}", query.model.name, query.devices, query.cluster.name),
                        .text = {}};
  for (const PlanPath& path : report.paths) section.text += fmt::format("{}: {}. ", path.name, verdict_of(path));
  if (report.best.empty()) {
    section.text += "No layout fits; the one that needs least: " + report.nearest_miss;
    return section;
  }
  section.charts.push_back(parts_chart(report));
  section.table = rows_of(report.best);
  return section;
}

std::string as_json(const PlanQuery& query, const PlanReport& report) {
  Json json = {{"model", query.model.name},
               {"cluster", query.cluster.name},
               {"gpus", query.devices},
               {"global_batch_rows", query.global_batch_rows},
               {"sequence", query.sequence},
               {"precision", query.precision},
               {"layouts", report.candidates},
               {"simulated", report.simulated},
               {"out_of_memory", report.out_of_memory},
               {"search_seconds", report.seconds},
               {"best", Json::array()},
               {"paths", Json::array()},
               {"nearest_miss", report.nearest_miss}};
  for (const PlanCandidate& candidate : report.best) json["best"].push_back(candidate_json(candidate));
  for (const PlanPath& path : report.paths) json["paths"].push_back(path_json(path));
  return with_sections(std::move(json), {section_of(query, report)});
}

// A training configuration of the small twin of the best layout.
void write_twin(const PlanReport& report, const std::string& file) {
  const TwinRun twin = small_twin_of(report.best.front(), kTwinRanks);
  RunConfig config;
  config.model = twin.model;
  config.plan = twin.plan;
  write_output(file, to_json(config));
}

int plan_action(const Arguments& arguments) {
  require_writable(arguments.json, "--json");
  require_writable(arguments.write, "--write");
  const PlanQuery query = query_of(arguments);
  const PlanReport report = search_plans(query);
  if (query.is_stopped()) return kInterrupted;
  if (arguments.json != "-") print(query, report);
  if (!arguments.write.empty() && !report.best.empty()) write_twin(report, arguments.write);
  if (!arguments.json.empty()) write_output(arguments.json, as_json(query, report));
  return report.best.empty() ? kCheckFailed : kGood;
}

}  // namespace

void add_plan_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("plan", "The fastest layouts of a model on a cluster, simulated");
  const auto arguments = std::make_shared<Arguments>();
  arguments->stop = &line.stop;
  command->add_option("--model", arguments->model, "file, or a name that tandem list shows")->required()->check(not_empty);
  command->add_option("--cluster", arguments->cluster, "file, or a name that tandem list shows")->required()->check(not_empty);
  command->add_option("--gpus", arguments->devices, "whole nodes, or a part of one")->required()->check(at_least_one);
  command->add_option("--global-batch", arguments->global_batch, "rows of a step; default: by the size of the model")
      ->check(at_least_one);
  command->add_option("--sequence", arguments->sequence, "tokens of a row; default: the model's")->check(at_least_one);
  command->add_option("--precision", arguments->precision, "arithmetic of the step; default: bf16 where the device has it");
  command->add_option("--schedules", arguments->schedules, "of 1f1b, interleaved, zb-h1, zb-v those to search; default: all")
      ->delimiter(',');
  command->add_option("--most", arguments->most, "largest degree of an axis, such as context=1; may be repeated")
      ->type_size(1)
      ->allow_extra_args(false);
  command->add_option("--top", arguments->top, "layouts to show, no two with the same degrees")
      ->capture_default_str()
      ->check(at_least_one);
  command->add_option("--json", arguments->json,
                      "write all that was found, for tandem report and tandem scale; - is standard output");
  command->add_option("--write", arguments->write, "write a training configuration of a small twin of the best layout");
  command->footer(
      "Every layout is looked at: data x tensor x pipeline x context x expert, schedule, chunks, rows of a micro-batch,\n"
      "recomputation, ZeRO stage, sequence parallelism. Two orders of reasoning are compared with the best. rows: of a\n"
      "micro-batch x micro-batches. Exit 1: nothing fits.\n"
      "Example:\n"
      "  tandem plan --model gpt3-175b --cluster dgx-a100 --gpus 1024 --write twin.json\n"
      "  tandem train twin.json --data synthetic --steps 3");
  command->callback([&line, arguments] { line.action = [arguments] { return plan_action(*arguments); }; });
}

}  // namespace tandem
