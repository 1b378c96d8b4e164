// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/pitfall.h"
#include "harness/finding.h"
#include "harness/verdict.h"

namespace tandem {

/// Norm and size of a whole stage of the truth: what a tensor with a true value of zero is measured against.
struct StageScale {
  double norm = 0;
  double num_elements = 0;
  /// sqrt(n / total) * norm: what a tensor of n elements would have if all elements were equally large.
  [[nodiscard]] double share(double n) const;
};
[[nodiscard]] StageScale scale_of(const StageEvidence& stage);

/// True where the tensor of this stage is judged: everywhere, but for true zeros after an optimizer under Criterion::rounding.
[[nodiscard]] bool is_judged(Criterion criterion, const StageEvidence& stage, const EvidenceTensor& truth);

/// True where |truth| is so small that an error relative to it says nothing: 64 eps of the tensor's share, or a true zero.
[[nodiscard]] bool is_judged_absolutely(const StageScale& scale, const EvidenceTensor& truth, double unit_roundoff);

/// eps sqrt(K), times the tensor's share when judged absolutely.
[[nodiscard]] double rounding_floor(const StageScale& scale, const EvidenceTensor& truth, double unit_roundoff);

/// 4 max(yardstick_error, floor)
[[nodiscard]] double rounding_bound(double yardstick_error, double floor);

/// Every judged tensor in execution order. The sides are complete (check_completeness). Fault point: bound_widened.
[[nodiscard]] std::vector<TensorVerdict> compare_tensors(Criterion criterion, const Sides& sides, const PitfallSet& pitfalls);

/// error / bound; 0 when there is no error, infinite when there is one and the bound is zero, or when it is NaN.
[[nodiscard]] double error_over_bound(const TensorVerdict& tensor);

}  // namespace tandem
