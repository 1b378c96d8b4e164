// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/planner_bound.h"

#include <algorithm>

namespace tandem::planner {
namespace {

constexpr double kRounding = 1e-9;  // of sums in another order than the simulator's

bool splits_backward(Schedule schedule) { return schedule == Schedule::zb_h1 || schedule == Schedule::zb_v; }

}  // namespace

const StepBound::Parts& StepBound::parts_of(const PlannedLayout& layout) {
  const Key key{layout.tensor,    layout.context,          layout.expert, layout.rows, layout.micro_batches > 1,
                layout.recompute, layout.sequence_parallel};
  const auto [found, is_new] = parts_.try_emplace(key);
  if (is_new) {
    const auto passes = [](const PassTriple& pass) {
      return Passes{pass.forward.total(), pass.backward_input.total() + pass.backward_weight.total()};
    };
    apply(layout, workload_);
    const LayerCost cost(workload_, cost_);
    found->second = {passes(cost.layer(layout.recompute != Recompute::none)), passes(cost.embedding()), passes(cost.head())};
  }
  return found->second;
}

StepBound::Passes StepBound::stage(const PlannedLayout& layout, const Parts& parts, int index) const {
  const int stages = layout.pipeline * layout.chunks;
  const auto layers = static_cast<double>(balanced_part(query_.model.layers, stages, index).size());
  Passes passes{layers * parts.layer.forward, layers * parts.layer.backward};
  if (index == 0) {
    passes.forward += parts.embedding.forward;
    passes.backward += parts.embedding.backward;
  }
  if (index == stages - 1) {
    passes.forward += parts.head.forward;
    passes.backward += parts.head.backward;
  }
  return passes;
}

double StepBound::seconds(const PlannedLayout& layout) {
  const Parts& parts = parts_of(layout);
  const bool returns = !splits_backward(layout.schedule);
  double largest = 0;
  double on_the_way = 0;
  for (int rank = 0; rank < layout.pipeline; ++rank) {
    const Passes first = stage(layout, parts, rank);
    double work = first.forward + first.backward;
    for (int chunk = 1; chunk < layout.chunks; ++chunk) {
      const bool back = layout.schedule == Schedule::zb_v;
      const Passes more = stage(layout, parts, back ? 2 * layout.pipeline - 1 - rank : chunk * layout.pipeline + rank);
      work += more.forward + more.backward;
    }
    largest = std::max(largest, on_the_way + layout.micro_batches * work);
    on_the_way += first.forward + (returns ? first.backward : 0);
  }
  return largest * (1 - kRounding);
}

}  // namespace tandem::planner
