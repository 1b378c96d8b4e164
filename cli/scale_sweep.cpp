// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/scale_command.h"
#include "cli/scaling_report.h"
#include "cli/terminal.h"
#include "core/config.h"
#include "core/error.h"
#include "harness/text_table.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

SizePoint point_at(const ScaleArguments& arguments, const ModelShape& model, const ClusterSpec& cluster,
                   const TrainingPlan& layout, int devices) {
  SizePoint point{.devices = devices, .workload = {}, .estimate = {}, .refused = {}};
  try {
    if (arguments.best) {
      const PlanReport report = search_plans(best_query(arguments, model, cluster, devices));
      if (report.best.empty()) throw InputError("no layout fits: " + report.nearest_miss);
      point.workload = report.best.front().workload;
      point.estimate = report.best.front().estimate;
    } else {
      point.workload = workload_at(arguments, model, layout, devices);
      point.estimate = simulate(point.workload, cluster);
    }
  } catch (const InputError& error) {
    point.refused = error.what();
  }
  return point;
}

std::vector<SizePoint> sweep(const ScaleArguments& arguments, const ModelShape& model, const ClusterSpec& cluster) {
  const TrainingPlan layout = layout_of(arguments, usual_precision(cluster));
  std::vector<SizePoint> points;
  ProgressLine progress;
  for (const int devices : arguments.devices) {
    if (*arguments.stop) break;
    progress.show(std::ssize(points), std::ssize(arguments.devices), fmt::format("{} devices", devices));
    points.push_back(point_at(arguments, model, cluster, layout, devices));
  }
  if (!*arguments.stop &&
      std::all_of(points.begin(), points.end(), [](const SizePoint& point) { return !point.refused.empty(); })) {
    throw InputError(points.front().refused);
  }
  return points;
}

// Tokens a second of a device, relative to the first size.
double efficiency(const std::vector<SizePoint>& points, const SizePoint& point) {
  const auto rate = [](const SizePoint& at) { return at.estimate.tokens_per_second / at.devices; };
  const auto first = std::find_if(points.begin(), points.end(), [](const SizePoint& at) { return at.refused.empty(); });
  return rate(point) / rate(*first);
}

CellRows rows_of(const std::vector<SizePoint>& points) {
  CellRows rows = {{"GPUs", "layout", "schedule", "rows", "zero", "recompute", "step", "tokens/s", "MFU", "efficiency", "compute",
                    "communication", "bubble", "optimizer", "data", "stall", "memory"}};
  for (const SizePoint& point : points) {
    if (!point.refused.empty()) {
      rows.emplace_back(rows.front().size(), "-");
      rows.back().front() = fmt::format("{}", point.devices);
      rows.back()[1] = "not possible";
      continue;
    }
    const TrainingPlan& plan = point.workload.plan;
    const StepEstimate& estimate = point.estimate;
    const StepShares shares = shares_of(estimate);
    rows.push_back({fmt::format("{}", point.devices), degrees_text(plan.parallel), schedule_text(plan),
                    fmt::format("{} x {}", micro_batch_rows(plan), plan.batch.micro_batches), fmt::format("{}", plan.zero_stage),
                    plan.recompute.mode, human_seconds(estimate.step_seconds), human_count(estimate.tokens_per_second),
                    human_share(estimate.model_flops_utilization), human_share(efficiency(points, point)),
                    human_share(shares.compute), human_share(shares.communication), human_share(shares.bubble),
                    human_share(shares.optimizer), human_share(shares.data), human_share(shares.stall),
                    memory_of_limit(estimate.memory) + (estimate.memory.fits() ? "" : ", does not fit")});
  }
  return rows;
}

ChartSeries series_of(const std::string& name, const std::vector<SizePoint>& points, double (*value)(const SizePoint&)) {
  ChartSeries series{.name = name, .x = {}, .y = {}};
  for (const SizePoint& point : points) {
    if (!point.refused.empty()) continue;
    series.x.push_back(point.devices);
    series.y.push_back(value(point));
  }
  return series;
}

Chart shares_chart(const std::vector<SizePoint>& points) {
  Chart chart{
      .id = "scale_shares",
      .title = "Where the step goes",
      .caption = "Shares of the step; communication is what nothing hides.",
      .x_label = "GPUs",
      .y_label = "share of the step",
      .log_x = true,
      .stacked = true,
      .series = {series_of("compute", points, [](const SizePoint& at) { return shares_of(at.estimate).compute; }),
                 series_of("communication", points, [](const SizePoint& at) { return shares_of(at.estimate).communication; }),
                 series_of("bubble", points, [](const SizePoint& at) { return shares_of(at.estimate).bubble; }),
                 series_of("optimizer", points, [](const SizePoint& at) { return shares_of(at.estimate).optimizer; }),
                 series_of("data", points, [](const SizePoint& at) { return shares_of(at.estimate).data; })}};
  std::erase_if(chart.series, [](const ChartSeries& series) {
    return std::all_of(series.y.begin(), series.y.end(), [](double share) { return share == 0; });
  });
  return chart;
}

Chart throughput_chart(const std::vector<SizePoint>& points) {
  ChartSeries predicted = series_of("simulated", points, [](const SizePoint& at) { return at.estimate.tokens_per_second; });
  ChartSeries ideal{.name = "every GPU as fast as at the first size", .x = predicted.x, .y = {}};
  for (const double devices : ideal.x) ideal.y.push_back(predicted.y.front() / ideal.x.front() * devices);
  return {.id = "scale_throughput",
          .title = "Throughput",
          .caption = "Tokens a second of all GPUs.",
          .x_label = "GPUs",
          .y_label = "tokens/s",
          .log_x = true,
          .log_y = true,
          .series = {std::move(predicted), std::move(ideal)}};
}

Json points_json(const std::vector<SizePoint>& points) {
  Json all = Json::array();
  for (const SizePoint& point : points) {
    if (!point.refused.empty()) {
      all.push_back({{"gpus", point.devices}, {"refused", point.refused}});
      continue;
    }
    const StepShares shares = shares_of(point.estimate);
    Json json = {{"gpus", point.devices}};
    json.update(estimate_json(point.estimate));
    json["efficiency"] = efficiency(points, point);
    json["shares"] = {{"compute", shares.compute}, {"communication", shares.communication},
                      {"bubble", shares.bubble},   {"optimizer", shares.optimizer},
                      {"data", shares.data},       {"stall", shares.stall}};
    json["plan"] = plan_json(point.workload.plan);
    all.push_back(std::move(json));
  }
  return all;
}

std::string passes(const std::vector<SizePoint>& points, double share) {
  double largest = 0;
  for (const SizePoint& point : points) {
    if (!point.refused.empty()) continue;
    const double now = shares_of(point.estimate).communication;
    if (now >= share)
      return fmt::format("passes {:.0f} % of the step at {} GPUs ({})", 100 * share, point.devices, human_share(now));
    largest = std::max(largest, now);
  }
  return fmt::format("stays below {:.0f} % of the step up to {} GPUs ({} at most)", 100 * share, points.back().devices,
                     human_share(largest));
}

}  // namespace

std::string communication_sentence(const std::vector<SizePoint>& points) {
  return fmt::format("communication that nothing hides {}, and {}", passes(points, 0.1), passes(points, 0.5));
}

ScaleResult scale_sweep(const ScaleArguments& arguments) {
  const ModelShape model = read_model_shape(arguments.model);
  const ClusterSpec cluster = read_cluster(arguments.clusters.front());
  require_sizes(arguments, cluster);
  const std::vector<SizePoint> points = sweep(arguments, model, cluster);
  if (*arguments.stop) return {};
  const CellRows rows = rows_of(points);
  const bool weak = arguments.per_gpu_batch > 0;
  const std::string batch = weak ? fmt::format("{} rows a GPU (weak scaling)", arguments.per_gpu_batch)
                                 : fmt::format("{} rows a step (strong scaling)", rows_at(arguments, model, 1));
  const std::string layout = arguments.best ? "the best layout of each size" : "one layout with more data ranks";
  const std::string title = fmt::format("{} on {}: {}, {}", model.name, cluster.name, batch, layout);
  const std::string sentence = communication_sentence(points);
  ScaleResult result;
  result.text = fmt::format("{}\n{}", title, rendered(rows, output_style()));
  for (const SizePoint& point : points) {
    if (!point.refused.empty()) result.text += fmt::format("{} GPUs: {}\n", point.devices, point.refused);
  }
  result.text += sentence + "\n";
  result.sections = {{.title = "Scaling: " + title,
                      .text = sentence,
                      .charts = {shares_chart(points), throughput_chart(points)},
                      .table = rows}};
  result.document = Json{
      {"model", model.name},
      {"cluster", cluster.name},
      {"scaling", weak ? "weak" : "strong"},
      {"points", points_json(points)},
      {"communication",
       sentence}}.dump();
  return result;
}

}  // namespace tandem
