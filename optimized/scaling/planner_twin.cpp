// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/scaling/planner.h"

namespace tandem {
namespace {

// Every axis that the plan uses gets two ranks while there are enough: first those that cut the model.
ParallelDegrees small_degrees(const ParallelDegrees& large, int most_ranks) {
  ParallelDegrees small;
  const std::array<std::pair<int ParallelDegrees::*, bool>, 4> axes = {{{&ParallelDegrees::tensor, large.tensor > 1},
                                                                        {&ParallelDegrees::pipeline, large.pipeline > 1},
                                                                        {&ParallelDegrees::data, large.data > 1},
                                                                        {&ParallelDegrees::context, large.context > 1}}};
  for (const auto& [axis, used] : axes) {
    if (used && 2 * small.world_size() <= most_ranks) small.*axis = 2;
  }
  small.expert = std::min(large.expert, small.data);
  return small;
}

PipelineConfig small_pipeline(const PipelineConfig& large, int ranks) {
  PipelineConfig small = large;
  small.stage_layers.clear();
  if (ranks == 1) return {};
  small.chunks = std::min(small.chunks, 2);
  return small;
}

}  // namespace

TwinRun small_twin_of(const PlanCandidate& candidate, int most_ranks) {
  TANDEM_CHECK(most_ranks >= 1, fmt::format("a twin of {} ranks", most_ranks));
  const TrainingPlan& large = candidate.workload.plan;
  TwinRun twin{.model = {}, .plan = large};
  TrainingPlan& plan = twin.plan;
  plan.parallel = small_degrees(large.parallel, most_ranks);
  plan.pipeline = small_pipeline(large.pipeline, plan.parallel.pipeline);
  plan.sequence_parallel = large.sequence_parallel && plan.parallel.tensor > 1;
  // Two rounds of the pipeline, as many rows in each micro-batch as there are data ranks.
  plan.batch.micro_batches = large.batch.micro_batches > 1 ? 2 * plan.parallel.pipeline : 1;
  plan.batch.rows = static_cast<std::int64_t>(plan.parallel.data) * plan.batch.micro_batches;
  twin.model = small_twin(candidate.workload.model, plan.parallel.tensor, plan.parallel.pipeline * plan.pipeline.chunks);
  require_legal(plan, twin.model);
  return twin;
}

}  // namespace tandem
