// SPDX-License-Identifier: Apache-2.0
// What becomes of a step as devices are added, and how layouts are found: C03, C09.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "optimized/scaling/planner.h"
#include "optimized/scaling/simulator.h"
#include "suites/claims_parts.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

// ---- C03

// Plain data parallelism of one global batch: every step ends with an all-reduce that nothing hides.
double share_on(const ClusterSpec& cluster, const std::string& model, std::int64_t rows, int devices) {
  Workload workload;
  workload.model = read_model_shape(model);
  workload.plan.parallel.data = devices;
  workload.plan.precision = "bf16";
  workload.plan.numerics = numerics_from_precision("bf16");
  workload.plan.batch = {rows, static_cast<int>(std::max<std::int64_t>(1, rows / devices / 4))};
  workload.software.overlap_gradients = false;
  const StepEstimate estimate = simulate(workload, cluster);
  return estimate.parts.communication() / estimate.step_seconds;
}

// The article's cluster is not described; this is DGX A100 with one 100 Gb/s Ethernet port a node in place of eight of
// InfiniBand.
ClusterSpec with_ethernet(ClusterSpec cluster) {
  cluster.name = "dgx-a100 with 100 Gb/s Ethernet a node";
  cluster.levels.back().name = "ethernet";
  cluster.levels.back().bytes_per_second = 12.5e9 / cluster.devices_per_node;
  cluster.levels.back().latency_seconds = 3e-5;
  return cluster;
}

constexpr std::int64_t kRows = 1024;
constexpr const char* kModel = "gpt-1.7b";

// Devices at which a share is reached, between two sizes by the logarithm; nothing where it never is.
double reached_at(const ClusterSpec& cluster, double share, double& largest) {
  double before = 0, size_before = 0;
  largest = 0;
  double found = kNoFigure;
  for (int devices = cluster.devices_per_node; devices <= kRows; devices *= 2) {
    const double here = share_on(cluster, kModel, kRows, devices);
    if (std::isnan(found) && here >= share) {
      const double part = before > 0 ? (share - before) / (here - before) : 1;
      found = before > 0 ? size_before * std::pow(devices / size_before, part) : devices;
    }
    largest = std::max(largest, here);
    before = here;
    size_before = devices;
  }
  return found;
}

void add_measured(ClaimEffort effort, const RunContext& context, ClaimFindings& found) {
  ParallelVariant variant{.rows = 8, .dropout = 0.0, .row_shape = RowShape::full};
  constexpr double kForward = 0.1;
  const double work = 3 * kForward * variant.layers;
  const double gradient_bytes = 4 * static_cast<double>(num_parameters(model_of(variant)));
  const LinkProfile link = stated_link(2e-4, gradient_bytes / (0.09 * work));  // two ranks: 0.09 of the work over half of it
  for (const int ranks : effort == ClaimEffort::quick ? std::vector<int>{2, 8} : std::vector<int>{2, 4, 8}) {
    variant.degrees.data = ranks;
    const StatedRun run = stated_run(variant, kForward, link, context);
    found.figures.push_back(
        {fmt::format("share{}", ranks), fmt::format("share of the step on {} ranks behind a shaped link", ranks), kNoFigure,
         run.predicted_exposed_seconds / run.predicted_step_seconds, run.exposed_seconds / run.step_seconds, "share"});
  }
}

ClaimFindings find_growth(ClaimEffort effort, const RunContext& context) {
  const ClusterSpec infiniband = read_cluster("dgx-a100");
  const ClusterSpec ethernet = with_ethernet(infiniband);
  ClaimFindings found;
  double most_ethernet = 0, most_infiniband = 0;
  const double ten = reached_at(ethernet, 0.1, most_ethernet);
  const double fifty = reached_at(ethernet, 0.5, most_ethernet);
  const double ten_infiniband = reached_at(infiniband, 0.1, most_infiniband);
  add_measured(effort, context, found);
  const ClaimFigure first = found.figures.front(), last = found.figures.back();
  const auto add = [&](const std::string& key, const std::string& what, double stated, double predicted,
                       const std::string& unit) {
    found.figures.push_back({key, what, stated, predicted, kNoFigure, unit});
  };
  found.figures.insert(found.figures.begin(),
                       {{"first", "share on the fewest ranks here", 0.1, first.predicted, first.measured, "share"},
                        {"last", "share on the most ranks here", 0.5, last.predicted, last.measured, "share"}});
  add("ten", fmt::format("10 % is reached, {}, {} rows, DGX A100 with 100 Gb/s Ethernet a node", kModel, kRows), kNoFigure, ten,
      "GPUs");
  add("fifty", "50 % is reached there", kNoFigure, fifty, "GPUs");
  add("most_ethernet", fmt::format("share there on {} GPUs", kRows), kNoFigure, most_ethernet, "share");
  add("ten_infiniband", "10 % is reached on DGX A100 with 8 x 200 Gb/s InfiniBand", kNoFigure, ten_infiniband, "GPUs");
  add("most_infiniband", fmt::format("share there on {} GPUs, a row each", kRows), kNoFigure, most_infiniband, "share");
  found.not_measured = "The clusters: their curves are simulated.";
  return found;
}

Claim growth(ClaimEffort effort) {
  return {
      "C03",
      "2.2",
      "Plain data parallelism all-reduces every step; its share grows from about 10 % to more than 50 % as nodes are added",
      "tandem scale --model gpt-1.7b --cluster dgx-a100 --gpus 8,16,32,64,128,256,512,1024",
      [effort](const RunContext& context) { return find_growth(effort, context); },
      {{"last", Of::measured, Relation::at_least, 0.45, ClaimVerdict::does_not_hold,
        "The share does not come to a half behind the shaped link."},
       {"first", Of::measured, Relation::at_most, 0.25, ClaimVerdict::imprecise, "It begins far above a tenth."},
       {"most_ethernet", Of::predicted, Relation::at_least, 0.5, ClaimVerdict::does_not_hold,
        "Not even with one Ethernet port a node does the share come to a half."},
       {"most_infiniband", Of::predicted, Relation::at_least, 0.5, ClaimVerdict::holds_within_limits,
        "Limit: at a fixed global batch, without overlap, and on a slow network; with InfiniBand for each GPU the share stays "
        "below a half down to one row a GPU."}},
      [](const ClaimFindings& f) {
        const auto size = [&](const char* key) {
          return std::isnan(f.predicted(key)) ? std::string("no size") : fmt::format("{:.0f} GPUs", f.predicted(key));
        };
        return fmt::format(
            "Behind a shaped link it grows from {:.0f} to {:.0f} % here. Simulated for {}: 10 % at {} and 50 % at {} "
            "with 100 Gb/s Ethernet a node; with InfiniBand 10 % at {}, {:.0f} % at {}.",
            100 * f.measured("first"), 100 * f.measured("last"), kModel, size("ten"), size("fifty"), size("ten_infiniband"),
            100 * f.predicted("most_infiniband"), kRows);
      }};
}

// ---- C09

struct Asked {
  std::string key, model, cluster;
  int devices = 0;
};

std::vector<Asked> asked(ClaimEffort effort) {
  std::vector<Asked> all = {{"7b", "llama2-7b", "dgx-a100", 64}, {"175b", "gpt3-175b", "dgx-a100", 1024}};
  if (effort == ClaimEffort::usual) {
    all.push_back({"20b", "gpt-18.4b", "dgx1-v100", 256});
    all.push_back({"1t", "gpt-1t", "dgx-a100", 3072});
  }
  return all;
}

ClaimFindings find_path(ClaimEffort effort, const RunContext&) {
  ClaimFindings found;
  double worst = 0, seconds = 0, tensor = 0;
  for (const Asked& query : asked(effort)) {
    const PathOutcome path = follow_path("tuning path", query.model, query.cluster, query.devices);
    found.figures.push_back(
        {"over_" + query.key,
         fmt::format("step by the path over the exhaustive best, {} on {} of {}", query.model, query.devices, query.cluster), 1,
         path.over_best, kNoFigure, "x"});
    if (std::isnan(path.over_best) || path.over_best > worst) worst = path.over_best;  // nothing that fits stays the worst
    seconds += path.search_seconds;
    tensor = std::max(tensor, static_cast<double>(path.best_tensor));
  }
  found.figures.insert(found.figures.begin(),
                       {{"worst", "step by the path over the exhaustive best, worst case", 1, worst, kNoFigure, "x"},
                        {"tensor", "largest tensor degree of the exhaustive best, node of 8", 8, tensor, kNoFigure, "ranks"},
                        {"search", "exhaustive search of all cases", kNoFigure, kNoFigure, seconds, "s"}});
  found.not_measured = "The steps themselves: both are simulated, with errors as the suite scaling reports them.";
  return found;
}

Claim path(ClaimEffort effort) {
  return {"C09",
          "3.2",
          "Tuning path: the largest shard that fits a device, TP up to the node, PP and recomputation for what is left, DP for "
          "throughput",
          "tandem plan --model gpt3-175b --cluster dgx-a100 --gpus 1024",
          [effort](const RunContext& context) { return find_path(effort, context); },
          {{"tensor", Of::predicted, Relation::at_most, 8, ClaimVerdict::imprecise, "The best layout has TP across nodes."},
           {"worst", Of::predicted, Relation::at_most, 2, ClaimVerdict::does_not_hold,
            "Somewhere the path finds nothing that fits, or what is half as fast as the best."},
           {"worst", Of::predicted, Relation::at_most, 1.25, ClaimVerdict::imprecise,
            "The path is a start: what it finds is more than a quarter slower than the best in at least one case."},
           {"worst", Of::predicted, Relation::at_most, 1.05, ClaimVerdict::holds_within_limits,
            "Limit: it fits and is near, but a search finds more than 5 %."}},
          [](const ClaimFindings& f) {
            std::string text = "By simulation the path's layouts take";
            for (const ClaimFigure& figure : f.figures) {
              if (!figure.key.starts_with("over_")) continue;
              text += fmt::format(" {} ({})",
                                  std::isnan(figure.predicted) ? "none that fits" : fmt::format("{:.2f} x", figure.predicted),
                                  figure.key.substr(5));
            }
            return text +
                   fmt::format(" the step time of the exhaustive best, which was found in {:.1f} s.", f.measured("search"));
          }};
}

}  // namespace

PathOutcome follow_path(const std::string& path, const std::string& model, const std::string& cluster, int devices) {
  PlanQuery query;
  query.model = read_model_shape(model);
  query.cluster = read_cluster(cluster);
  query.devices = devices;
  const PlanReport report = search_plans(query);
  PathOutcome outcome;
  outcome.search_seconds = report.seconds;
  if (!report.best.empty()) outcome.best_tensor = report.best.front().workload.plan.parallel.tensor;
  for (const PlanPath& entry : report.paths) {
    if (entry.name == path && entry.over_best > 0) outcome.over_best = entry.over_best;
  }
  return outcome;
}

std::vector<Claim> scale_claims(ClaimEffort effort) { return {growth(effort), path(effort)}; }

}  // namespace tandem
