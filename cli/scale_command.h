// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/run_options.h"
#include "harness/report/report.h"
#include "optimized/scaling/planner.h"

namespace tandem {

struct ScaleArguments {
  std::string model;
  std::vector<std::string> clusters;
  std::vector<int> devices;
  std::int64_t global_batch = 0;   ///< of every size: strong scaling
  std::int64_t per_gpu_batch = 0;  ///< of one device: weak scaling
  std::int64_t micro_batch = 0;    ///< rows
  std::int64_t sequence = 0;
  std::string precision;
  std::string plan_file;
  std::vector<std::string> settings;
  bool best = false;
  std::string published;
  bool measured = false;
  WorldArguments world;
  int steps = 5;
  std::string chakra, programs_file;  ///< where the layout's step programs go: prefix, file
  std::string json;
  std::vector<std::string> given;           ///< options that the command line has
  const std::atomic<bool>* stop = nullptr;  ///< ends the sweep before the next size; what it returns then means nothing
};

/// What a mode of the command found: for people, and for --json.
struct ScaleResult {
  std::string text;
  std::vector<ReportSection> sections;
  std::string document = "{}";  ///< JSON object of the mode's own keys
};

/// A size of a sweep.
struct SizePoint {
  int devices = 0;
  Workload workload;
  StepEstimate estimate;
  std::string refused;  ///< why there is no estimate
};

/// The layout that --plan and --set give; plain data parallelism without them. `precision`: where nothing says it.
[[nodiscard]] TrainingPlan layout_of(const ScaleArguments& arguments, const std::string& precision);
/// Rows of a step on so many devices.
[[nodiscard]] std::int64_t rows_at(const ScaleArguments& arguments, const ModelShape& model, int devices);
/// The layout with as many data ranks as there are devices for. Throws InputError where the numbers do not divide.
[[nodiscard]] Workload workload_at(const ScaleArguments& arguments, const ModelShape& model, const TrainingPlan& layout,
                                   int devices);
[[nodiscard]] PlanQuery best_query(const ScaleArguments& arguments, const ModelShape& model, const ClusterSpec& cluster,
                                   int devices);
/// Throws InputError where sizes are no whole nodes of the cluster.
void require_sizes(const ScaleArguments& arguments, const ClusterSpec& cluster);

/// "communication passes 10 % of the step at 16 GPUs (12.1 %) and 50 % at 256 GPUs (51.3 %)"
[[nodiscard]] std::string communication_sentence(const std::vector<SizePoint>& points);

/// One cluster, a row per size.
[[nodiscard]] ScaleResult scale_sweep(const ScaleArguments& arguments);
/// Several: the best layout of each, and what each of these takes on the others.
[[nodiscard]] ScaleResult scale_clusters(const ScaleArguments& arguments);
/// Published configurations, predicted.
[[nodiscard]] ScaleResult scale_published(const ScaleArguments& arguments);
/// Ranks of this machine or job, beside what replaying their programs predicts. Collective.
[[nodiscard]] ScaleResult scale_measured(const ScaleArguments& arguments);

/// The step programs of one layout as files for other simulators; what was written, in words.
[[nodiscard]] std::string export_step(const ScaleArguments& arguments);

}  // namespace tandem
