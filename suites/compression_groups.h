// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "reference/compressed_reduction.h"
#include "suites/compression_run.h"

/// A run, seen by the groups of ranks that reduce a tensor together. For the properties of compression_run.h alone.
namespace tandem {

using Floats = std::vector<float>;

/// A tensor, or part of one, and the ranks that reduce its gradient together, in their order.
struct ReducingGroup {
  reference::CodedTensor tensor;
  std::vector<int> ranks;
};
[[nodiscard]] std::vector<ReducingGroup> reducing_groups(const PairInputs& inputs);

/// A step of one group: all vectors by element. Residuals from before the step are in its units.
struct GroupStep {
  std::vector<Floats> gradient, residual_before, residual;  ///< [ranks]
  Floats sum, sum_residual_before, sum_residual;            ///< zero where there is none
  bool skipped = false;
  std::int64_t step = 0;
  double scale_factor = 1;  ///< of the loss, over that of the step before
};
[[nodiscard]] GroupStep group_step(const CompressionRun& run, const ReducingGroup& group, std::size_t index);
void for_each_group_step(const CompressionScript& script, const CompressionRun& run,
                         const std::function<void(const ReducingGroup&, const GroupStep&)>& use);

/// The largest of some numbers, and where it was.
struct Worst {
  double value = 0;
  int step = -1;
  std::string tensor;
  void see(double other, const GroupStep& at, const ReducingGroup& group) {
    if (other <= value || std::isnan(value)) return;
    std::tie(value, step, tensor) = std::tuple(other, static_cast<int>(at.step), group.tensor.name);
  }
};

}  // namespace tandem
