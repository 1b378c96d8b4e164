// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/shrink.h"

#include <algorithm>
#include <cstdint>

#include "core/batch.h"

namespace tandem {
namespace {

// The larger parts come first, of the ranks and of the micro-batches.
std::int64_t largest_micro_batch(const TrainingPlan& plan) {
  return micro_batch_rows(plan.batch.rows, plan.parallel.data, 0, plan.batch.micro_batches, 0).size();
}

// The fewest micro-batches, and not fewer than before, that a legal plan has with at most so many rows in each. A schedule may
// want them in rounds of the pipeline's ranks, so that one more round is as far as it needs to be looked for.
std::optional<TrainingPlan> with_data_ranks(TrainingPlan plan, const GptConfig& model, int data, std::int64_t most_rows) {
  plan.parallel.data = data;
  const std::int64_t rows_of_a_rank = balanced_part(plan.batch.rows, data, 0).size();
  const std::int64_t needed = most_rows > 0 ? (rows_of_a_rank + most_rows - 1) / most_rows : 1;
  const int fewest = static_cast<int>(std::max<std::int64_t>(plan.batch.micro_batches, needed));
  for (int extra = 0; extra < std::max(1, plan.parallel.pipeline); ++extra) {
    plan.batch.micro_batches = fewest + extra;
    if (conflicts(plan, model).empty()) return plan;
  }
  return std::nullopt;
}

}  // namespace

std::optional<TrainingPlan> shrink_plan(const TrainingPlan& plan, const GptConfig& model, int ranks, const PitfallSet& pitfalls) {
  if (ranks >= plan.parallel.world_size()) return plan;
  const int ranks_of_a_replica = plan.parallel.tensor * plan.parallel.pipeline * plan.parallel.context;
  const std::int64_t most_rows = largest_micro_batch(plan);
  for (int data = std::min(plan.parallel.data, ranks / ranks_of_a_replica); data >= 1; --data) {
    std::optional<TrainingPlan> smaller = with_data_ranks(plan, model, data, most_rows);
    if (!smaller) continue;
    if (pitfalls.on(Pitfall::shrink_keeps_accumulation)) {  // the batch is what one rank computes, times the ranks
      smaller->batch.micro_batches = plan.batch.micro_batches;
      smaller->batch.rows = std::max<std::int64_t>(1, plan.batch.rows * data / plan.parallel.data);
    }
    if (pitfalls.on(Pitfall::departed_samples_forgotten)) {  // accumulation is adapted, but to the rows of those who stay
      smaller->batch.rows = balanced_part(plan.batch.rows, plan.parallel.data, data - 1).end;
    }
    return smaller;
  }
  return std::nullopt;
}

}  // namespace tandem
