// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "cli/scale_command.h"
#include "cli/scaling_report.h"
#include "core/config.h"
#include "core/error.h"

namespace tandem {
namespace {

std::int64_t sequence_of(const ScaleArguments& arguments, const ModelShape& model) {
  return arguments.sequence > 0 ? arguments.sequence : model.sequence;
}

std::int64_t rows_of_layout(const TrainingPlan& layout) { return std::max<std::int64_t>(1, micro_batch_rows(layout)); }

}  // namespace

TrainingPlan layout_of(const ScaleArguments& arguments, const std::string& precision) {
  RunConfig config;
  if (!precision.empty()) set_option(config, "precision=" + precision);
  config.plan.batch.rows = 1;  // one row a micro-batch, unless a file says otherwise
  if (!arguments.plan_file.empty()) config.plan = read_layout(arguments.plan_file);
  for (const std::string& setting : arguments.settings) set_option(config, setting);
  if (!arguments.precision.empty()) set_option(config, "precision=" + arguments.precision);
  return config.plan;
}

std::int64_t rows_at(const ScaleArguments& arguments, const ModelShape& model, int devices) {
  constexpr std::int64_t kMostRows = 100'000'000;  // of a step
  if (arguments.global_batch > kMostRows || arguments.per_gpu_batch > kMostRows / devices) {
    throw InputError(fmt::format("{} GPUs: --{} makes more than {} rows a step", devices,
                                 arguments.global_batch > 0 ? "global-batch" : "per-gpu-batch", kMostRows));
  }
  if (arguments.per_gpu_batch > 0) return arguments.per_gpu_batch * devices;
  return arguments.global_batch > 0 ? arguments.global_batch : usual_batch_rows(model, sequence_of(arguments, model));
}

Workload workload_at(const ScaleArguments& arguments, const ModelShape& model, const TrainingPlan& layout, int devices) {
  Workload workload{.model = model, .plan = layout, .sequence = sequence_of(arguments, model), .software = traits_of(layout)};
  TrainingPlan& plan = workload.plan;
  plan.parallel.data = 1;
  const int shard = plan.parallel.world_size();
  if (devices % shard != 0) {
    throw InputError(fmt::format("{} GPUs: the layout ({}) needs a multiple of {}", devices, degrees_text(plan.parallel), shard));
  }
  plan.parallel.data = devices / shard;
  plan.batch.rows = rows_at(arguments, model, devices);
  if (plan.batch.rows % plan.parallel.data != 0) {
    throw InputError(fmt::format("{} GPUs: {} rows a step cannot be dealt to {} data ranks evenly; change --global-batch",
                                 devices, plan.batch.rows, plan.parallel.data));
  }
  const std::int64_t rows_per_rank = plan.batch.rows / plan.parallel.data;
  if (arguments.micro_batch > rows_per_rank) {
    throw InputError(fmt::format("{} GPUs: --micro-batch {} is more than the {} rows of a data rank", devices,
                                 arguments.micro_batch, rows_per_rank));
  }
  // A rank with fewer rows than a micro-batch of the layout would have has one micro-batch.
  const std::int64_t rows = std::min(rows_per_rank, arguments.micro_batch > 0 ? arguments.micro_batch : rows_of_layout(layout));
  if (rows_per_rank % rows != 0) {
    throw InputError(fmt::format("{} GPUs: {} rows of a data rank cannot be cut into micro-batches of {}; change --micro-batch",
                                 devices, rows_per_rank, rows));
  }
  plan.batch.micro_batches = static_cast<int>(rows_per_rank / rows);
  return workload;
}

PlanQuery best_query(const ScaleArguments& arguments, const ModelShape& model, const ClusterSpec& cluster, int devices) {
  PlanQuery query;
  query.model = model;
  query.cluster = cluster;
  query.devices = devices;
  query.global_batch_rows = rows_at(arguments, model, devices);
  query.sequence = arguments.sequence;
  if (!arguments.precision.empty()) query.precision = arguments.precision;
  query.top = 1;
  return query;
}

void require_sizes(const ScaleArguments& arguments, const ClusterSpec& cluster) {
  for (const int devices : arguments.devices) {
    if (devices > cluster.devices_per_node && devices % cluster.devices_per_node != 0) {
      throw InputError(
          fmt::format("--gpus {}: no whole number of nodes: {} has {} a node", devices, cluster.name, cluster.devices_per_node));
    }
  }
}

}  // namespace tandem
