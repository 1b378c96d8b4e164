// SPDX-License-Identifier: Apache-2.0
#include "suites/expected_yardstick.h"

#include <cmath>

namespace tandem {
namespace {

// Sums of squares of what a yardstick is off its truth, in the order of stages, tensors and elements.
class SquaredErrors {
 public:
  void add(const Evidence& truth, const Evidence& narrow) {
    std::size_t at = 0;
    for_each_element(truth, [&](std::size_t stage, std::size_t tensor, std::size_t i) {
      const double error =
          narrow.stages.at(stage).tensors.at(tensor).values.at(i) - truth.stages[stage].tensors[tensor].values[i];
      if (at == squares_.size()) squares_.push_back(0);
      squares_[at++] += error * error;
    });
    ++count_;
  }

  [[nodiscard]] Evidence expected(const Evidence& truth, Evidence narrow) const {
    std::size_t at = 0;
    for_each_element(truth, [&](std::size_t stage, std::size_t tensor, std::size_t i) {
      narrow.stages[stage].tensors[tensor].values[i] =
          truth.stages[stage].tensors[tensor].values[i] + std::sqrt(squares_[at++] / count_);
    });
    return narrow;
  }

 private:
  template <class Function>
  static void for_each_element(const Evidence& evidence, Function&& function) {
    for (std::size_t stage = 0; stage < evidence.stages.size(); ++stage) {
      const auto& tensors = evidence.stages[stage].tensors;
      for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
        for (std::size_t i = 0; i < tensors[tensor].values.size(); ++i) function(stage, tensor, i);
      }
    }
  }

  std::vector<double> squares_;
  double count_ = 0;
};

}  // namespace

Evidence expected_yardstick(const PairInputs& inputs, const Evidence& truth) {
  const TrainingPlan& plan = inputs.plan;
  const auto narrow_of = [&plan](const PairInputs& at, ReferenceDecisions& decisions) {
    return reference_evidence<float>(at, plan.parallel.data, plan.batch.micro_batches, &decisions);
  };
  ReferenceDecisions own;
  Evidence yardstick = narrow_of(inputs, own);
  SquaredErrors errors;
  errors.add(truth, yardstick);
  for (int k = 1; k <= kNeighbours; ++k) {
    PairInputs neighbour = inputs;
    neighbour.neighbour = k;
    ReferenceDecisions exact, narrow;
    const Evidence there = reference_evidence<double>(neighbour, 1, 1, &exact);
    if (exact.smallest_margin < decided_margin(plan)) continue;
    const Evidence rounded = narrow_of(neighbour, narrow);
    if (narrow.skipped_steps == own.skipped_steps) errors.add(there, rounded);
  }
  yardstick.side += ", error to expect";
  return errors.expected(truth, std::move(yardstick));
}

}  // namespace tandem
