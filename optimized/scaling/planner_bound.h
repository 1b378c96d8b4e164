// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <tuple>

#include "optimized/scaling/layer_cost.h"
#include "optimized/scaling/planner_space.h"

/// Private to optimized/scaling/planner*.cpp and their test.
namespace tandem::planner {

/// Steps are never faster than these, whatever the ZeRO stage. Borrows query and cost model.
///
/// Pipeline rank r does all passes of its stages, for each micro-batch. Its first pass cannot begin before a micro-batch has come
/// through the r stages before it. Where a backward pass is whole, its last pass is one, and its result must go back through as
/// many. So for any order of passes, with F, I and W the seconds of a stage's forward, backward for the input and backward for
/// the weights, and m micro-batches:
///
///     step >= max over r of  sum_{s < r} F_s  +  m sum_{stages s of r} (F_s + I_s + W_s)  +  sum_{s < r} (I_s + W_s)
///
/// without the last sum for the schedules zb-h1 and zb-v. Messages, sums of gradients and the optimizer only add to it.
class StepBound {
 public:
  StepBound(const PlanQuery& query, const CostModel& cost) : query_(query), cost_(cost), workload_(base_workload(query)) {}
  [[nodiscard]] double seconds(const PlannedLayout& layout);

 private:
  struct Passes {
    double forward = 0, backward = 0;
  };
  struct Parts {
    Passes layer, embedding, head;
  };
  using Key = std::tuple<int, int, int, int, bool, Recompute, bool>;
  [[nodiscard]] const Parts& parts_of(const PlannedLayout& layout);
  [[nodiscard]] Passes stage(const PlannedLayout& layout, const Parts& parts, int index) const;

  const PlanQuery& query_;
  const CostModel& cost_;
  Workload workload_;
  std::map<Key, Parts> parts_;
};

}  // namespace tandem::planner
