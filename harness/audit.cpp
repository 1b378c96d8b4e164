// SPDX-License-Identifier: Apache-2.0
#include "harness/audit.h"

#include <cmath>

#include <fmt/format.h>

#include "harness/equivalence.h"

namespace tandem {
namespace {

// Both sides of the comparison below come from the same formulas, so only the order of a few roundings may differ.
constexpr double kSlack = 1 + 1e-12;

std::optional<Finding> audit_count(const Verdict& verdict, const Sides& sides) {
  std::size_t expected = 0;
  for (const StageEvidence& stage : sides.truth->stages) {
    for (const EvidenceTensor& tensor : stage.tensors) expected += is_judged(verdict.criterion, stage, tensor) ? 1 : 0;
  }
  if (verdict.tensors.size() == expected) return std::nullopt;
  return Finding{Status::invalid, "audit", fmt::format("{} of {} tensors were judged", verdict.tensors.size(), expected), -1, {}};
}

std::optional<Finding> audit_tensor(const TensorVerdict& judged, double allowed) {
  if (judged.bound <= allowed * kSlack) return std::nullopt;
  const bool beyond = !(judged.error <= allowed);
  return Finding{Status::invalid, "audit",
                 fmt::format("bound of {} in stage {} is {:.3g}, but only {:.3g} can be derived; its error is {:.3g}",
                             judged.tensor, judged.stage, judged.bound, allowed, judged.error),
                 judged.step, beyond ? judged.tensor : std::string()};
}

std::optional<Finding> audit_bounds(const Verdict& verdict, const Sides& sides) {
  std::optional<Finding> first;
  for (const StageEvidence& stage : sides.truth->stages) {
    const bool bitwise = verdict.criterion == Criterion::bitwise || stage.stage == kInitialParameters;
    const StageScale scale = scale_of(stage);
    for (const TensorVerdict& judged : verdict.tensors) {
      if (judged.stage != stage.stage || judged.step != stage.step) continue;
      const EvidenceTensor* truth = find_tensor(stage, judged.tensor);
      if (truth == nullptr) {
        return Finding{
            Status::invalid, "audit", fmt::format("{} was judged but is not in the truth", judged.tensor), judged.step, {}};
      }
      const double floor = rounding_floor(scale, *truth, sides.candidate->unit_roundoff);
      const double allowed = bitwise ? 0 : rounding_bound(judged.yardstick_error, floor);
      std::optional<Finding> finding = audit_tensor(judged, allowed);
      if (!finding) continue;
      // A tensor that the wide bound let through says more than one whose bound is merely too wide.
      if (!finding->tensor.empty()) return finding;
      if (!first) first = std::move(finding);
    }
  }
  return first;
}

}  // namespace

std::optional<Finding> audit(const Verdict& verdict, const Sides& sides) {
  if (sides.candidate == nullptr) return std::nullopt;
  if (verdict.ranks_judged != sides.candidate->ranks) {
    return Finding{Status::invalid,
                   "audit",
                   fmt::format("{} of {} ranks were judged", verdict.ranks_judged, sides.candidate->ranks),
                   -1,
                   {}};
  }
  if (verdict.criterion == Criterion::convergence) return std::nullopt;
  if (auto finding = audit_count(verdict, sides)) return finding;
  return audit_bounds(verdict, sides);
}

}  // namespace tandem
