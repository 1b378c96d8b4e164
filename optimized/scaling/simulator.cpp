// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/simulator.h"

#include <algorithm>
#include <utility>

#include "optimized/scaling/goodput.h"
#include "optimized/scaling/simulator_step.h"

namespace tandem {
namespace {

std::string bottleneck_of(StepParts parts) {
  parts.compute += std::exchange(parts.recompute, 0);
  return std::max_element(kStepParts.begin(), kStepParts.end(),
                          [&](const StepPart& a, const StepPart& b) { return parts.*a.seconds < parts.*b.seconds; })
      ->name;
}

void add_rates(const Workload& workload, const CostModel& costs, const SimulateOptions& options, StepEstimate& estimate) {
  const TrainingPlan& plan = workload.plan;
  const auto rows = static_cast<double>(plan.batch.rows);
  const std::int64_t tokens = workload.tokens_per_row();
  const double devices = plan.parallel.world_size();
  const double forward = forward_flops_per_row(workload.model, tokens, AttentionFlops::full) * rows;
  estimate.model_flops = 3 * forward;
  const double head = 2.0 * static_cast<double>(workload.model.vocabulary * workload.model.hidden * tokens) * rows;
  const int some = workload.software.recomputed_layers;
  const double share = some > 0 ? static_cast<double>(some) / static_cast<double>(workload.model.layers) : 1;
  const double again = plan.recompute.mode == "full" ? share * (forward - head) : 0;
  const double available = estimate.step_seconds * devices * costs.peak_flops(plan.precision);
  estimate.tokens_per_second = rows * static_cast<double>(tokens) / estimate.step_seconds;
  estimate.hardware_flops_utilization = (estimate.model_flops + again) / available;
  estimate.model_flops_utilization = options.pitfalls.on(Pitfall::recompute_counted_in_mfu) ? estimate.hardware_flops_utilization
                                                                                            : estimate.model_flops / available;
}

}  // namespace

StepEstimate simulate(const Workload& workload, const ClusterSpec& cluster, const SimulateOptions& options) {
  require_possible(workload);
  StepEstimate estimate = play_step(workload, cluster, options);
  const int devices = workload.plan.parallel.world_size();
  estimate.bottleneck = bottleneck_of(estimate.parts);
  add_rates(workload, CostModel(cluster), options, estimate);
  estimate.memory = estimate_memory(workload, cluster, options.pitfalls);
  estimate.goodput = estimate_goodput(workload, cluster, devices, estimate.step_seconds).useful_share;
  return estimate;
}

}  // namespace tandem
