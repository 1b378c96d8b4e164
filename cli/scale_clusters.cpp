// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "cli/scale_command.h"
#include "cli/scaling_report.h"
#include "cli/terminal.h"
#include "core/error.h"
#include "harness/text_table.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

struct Winner {
  ClusterSpec cluster;
  PlanCandidate best;
};

std::string layout_text(const TrainingPlan& plan) {
  std::string text =
      fmt::format("{}, rows {} x {}", degrees_text(plan.parallel), micro_batch_rows(plan), plan.batch.micro_batches);
  if (plan.parallel.pipeline > 1) text += ", " + schedule_text(plan);
  if (plan.recompute.mode != "none") text += ", recompute " + plan.recompute.mode;
  if (plan.zero_stage > 0) text += fmt::format(", zero {}", plan.zero_stage);
  return text;
}

// What the layout takes on another cluster over what that cluster's best takes.
std::string ratio_on(const Winner& layout, const Winner& there) {
  if (&layout == &there) return "1.00";
  try {
    const StepEstimate estimate = simulate(layout.best.workload, there.cluster);
    if (!estimate.memory.fits()) return "does not fit";
    return fmt::format("{:.2f}", estimate.step_seconds / there.best.estimate.step_seconds);
  } catch (const InputError&) {
    return "not possible";
  }
}

CellRows rows_of(const std::vector<Winner>& winners) {
  CellRows rows = {{"best on", "layout", "step", "tokens/s", "MFU", "communication", "bubble", "memory"}};
  for (const Winner& winner : winners) rows.front().push_back("on " + winner.cluster.name);
  for (const Winner& winner : winners) {
    const StepEstimate& estimate = winner.best.estimate;
    const StepShares shares = shares_of(estimate);
    rows.push_back({winner.cluster.name, layout_text(winner.best.workload.plan), human_seconds(estimate.step_seconds),
                    human_count(estimate.tokens_per_second), human_share(estimate.model_flops_utilization),
                    human_share(shares.communication), human_share(shares.bubble), memory_of_limit(estimate.memory)});
    for (const Winner& there : winners) rows.back().push_back(ratio_on(winner, there));
  }
  return rows;
}

std::string sentence_of(const std::vector<Winner>& winners) {
  std::vector<TrainingPlan> layouts;
  for (const Winner& winner : winners) {
    const TrainingPlan& plan = winner.best.workload.plan;
    if (std::find(layouts.begin(), layouts.end(), plan) == layouts.end()) layouts.push_back(plan);
  }
  if (layouts.size() == 1) return "one layout is the best on all of these clusters";
  return fmt::format(
      "no layout is best everywhere: {} clusters have {} different best ones; the last columns are step times over "
      "the best of that cluster",
      winners.size(), layouts.size());
}

std::vector<Winner> winners_of(const ScaleArguments& arguments, const ModelShape& model, int devices) {
  std::vector<Winner> winners;
  ProgressLine progress;
  for (const std::string& name : arguments.clusters) {
    if (*arguments.stop) break;
    progress.show(std::ssize(winners), std::ssize(arguments.clusters), name);
    const ClusterSpec cluster = read_cluster(name);
    PlanReport report = search_plans(best_query(arguments, model, cluster, devices));
    if (report.best.empty()) throw InputError(fmt::format("cluster {}: no layout fits: {}", name, report.nearest_miss));
    winners.push_back({cluster, std::move(report.best.front())});
  }
  return winners;
}

}  // namespace

ScaleResult scale_clusters(const ScaleArguments& arguments) {
  const ModelShape model = read_model_shape(arguments.model);
  for (const std::string& name : arguments.clusters) require_sizes(arguments, read_cluster(name));
  ScaleResult result;
  Json sizes = Json::array();
  for (const int devices : arguments.devices) {
    const std::vector<Winner> winners = winners_of(arguments, model, devices);
    if (*arguments.stop) return {};
    const CellRows rows = rows_of(winners);
    const std::string title =
        fmt::format("{} on {} GPUs, {} rows a step", model.name, devices, rows_at(arguments, model, devices));
    const std::string sentence = sentence_of(winners);
    result.text += fmt::format("{}\n{}{}\n", title, rendered(rows, output_style()), sentence);
    result.sections.push_back({.title = "Clusters: " + title, .text = sentence, .charts = {}, .table = rows});
    Json best = Json::array();
    for (const Winner& winner : winners) {
      Json json = {{"cluster", winner.cluster.name}};
      json.update(estimate_json(winner.best.estimate));
      json["plan"] = plan_json(winner.best.workload.plan);
      best.push_back(std::move(json));
    }
    sizes.push_back({{"gpus", devices}, {"clusters", best}, {"verdict", sentence}});
  }
  result.document = Json{{"model", model.name}, {"sizes", sizes}}.dump();
  return result;
}

}  // namespace tandem
