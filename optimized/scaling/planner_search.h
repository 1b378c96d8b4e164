// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "optimized/scaling/planner_bound.h"

/// Private to optimized/scaling/planner*.cpp and their test.
namespace tandem::planner {

/// "tensor 8 x pipeline 16 x data 8, interleaved with 3 chunks, 1 row, recompute selective, zero 1, sequence parallel"
[[nodiscard]] std::string describe(const TrainingPlan& plan);
/// Why `loser` is slower than `winner`, in points of the winner's step.
[[nodiscard]] std::string why_slower(const StepEstimate& loser, const StepEstimate& winner);
/// "needs 93.1 GiB of 80.0 GiB"
[[nodiscard]] std::string memory_text(const MemoryEstimate& memory);

/// The article's two orders of reasoning, simulated.
[[nodiscard]] std::vector<PlanPath> rules_of_thumb(const PlanQuery& query);

/// The search itself: layouts by ascending bound, of each the ZeRO stages that fit in memory, simulated while its bound can beat
/// what it would replace.
class PlanSearch {
 public:
  explicit PlanSearch(const PlanQuery& query);
  void run();
  [[nodiscard]] PlanReport report();

 private:
  struct Found {
    PlannedLayout layout;
    StepEstimate estimate;
    [[nodiscard]] bool before(const Found& other) const;
  };
  void sort_by_bound();
  [[nodiscard]] bool is_full() const { return std::ssize(best_) >= query_.top; }
  /// Seconds that a layout must not exceed to change the result.
  [[nodiscard]] double limit_of(const PlannedLayout& layout) const;
  void try_stages(PlannedLayout layout, double bound);
  void offer(Found found);

  const PlanQuery& query_;
  CostModel cost_;
  Workload workload_;
  std::vector<PlannedLayout> layouts_;
  std::vector<std::pair<double, std::uint32_t>> order_;  // bound, layout
  std::vector<Found> best_;                              // fastest first, no two with the same degrees
  PlanReport report_;
  PlannedLayout least_memory_;
  double least_bytes_ = 0;
};

}  // namespace tandem::planner
