// SPDX-License-Identifier: Apache-2.0
#include "harness/verdict.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "harness/audit.h"
#include "harness/completeness.h"
#include "harness/equivalence.h"
#include "harness/finding.h"
#include "harness/liveness.h"
#include "harness/replicas.h"

namespace tandem {
namespace {

std::string describe(const TensorVerdict& bad) {
  if (bad.bitwise) {
    return fmt::format("{} in stage {} differs in {:.3g} of its elements, first in element {}: {:.17g}, not {:.17g}", bad.tensor,
                       bad.stage, bad.error, bad.worst_index, bad.worst_value, bad.worst_truth);
  }
  return fmt::format("{} in stage {} has {} error {:.3g}, {:.3g} times its bound {:.3g}; element {} is {:.9g}, not {:.9g}",
                     bad.tensor, bad.stage, bad.absolute ? "absolute" : "relative", bad.error, error_over_bound(bad), bad.bound,
                     bad.worst_index, bad.worst_value, bad.worst_truth);
}

// Losses and norms are tensors over steps: their step is where the deviation is largest.
int step_of(const TensorVerdict& bad) {
  const bool over_steps = bad.stage == kLosses || bad.stage == kGradientNorms;
  return over_steps && bad.worst_index >= 0 ? static_cast<int>(bad.worst_index) : bad.step;
}

std::optional<Finding> check_tensors(Verdict& verdict) {
  std::optional<Finding> first;
  for (const TensorVerdict& tensor : verdict.tensors) {
    const double ratio = error_over_bound(tensor);
    if (verdict.worst_tensor.empty() || ratio > verdict.error_over_bound) {
      verdict.error_over_bound = ratio;
      verdict.error = tensor.error;
      verdict.bound = tensor.bound;
      verdict.worst_tensor = tensor.tensor;
      verdict.worst_stage = tensor.stage;
    }
    if (!first && !tensor.holds()) first = Finding{Status::fail, tensor.stage, describe(tensor), step_of(tensor), tensor.tensor};
  }
  return first;
}

// How much of its limit a property uses: 1 is the limit itself, more is a failure; infinite for NaN and for a broken equality.
double share_of_limit(const Property& property) {
  if (!property.holds() && (property.relation == Relation::equal || std::isnan(property.value))) return HUGE_VAL;
  if (property.relation == Relation::equal || property.value == property.limit)
    return property.relation == Relation::equal ? 0.0 : 1.0;
  // Below zero the larger number is the one nearer to it.
  const bool counts_up = (property.relation == Relation::at_most) == (property.limit >= 0);
  const double share = counts_up ? property.value / property.limit : property.limit / property.value;
  if (property.holds()) return std::isfinite(share) ? std::clamp(share, 0.0, 1.0) : 0.0;
  return std::isfinite(share) && share > 1 ? share : HUGE_VAL;
}

// A case without tensors is as good as its worst property: value and limit stand for error and bound.
void summarise_properties(Verdict& verdict) {
  if (!verdict.tensors.empty()) return;
  for (const Property& property : verdict.properties) {
    const double share = share_of_limit(property);
    if (!verdict.worst_tensor.empty() && share <= verdict.error_over_bound) continue;
    verdict.error_over_bound = share;
    verdict.error = property.value;
    verdict.bound = property.limit;
    verdict.worst_tensor = property.tensor.empty() ? property.name : property.tensor;
    verdict.worst_stage = property.name;
  }
}

std::optional<Finding> check_properties(const std::vector<Property>& properties) {
  for (const Property& property : properties) {
    if (property.holds()) continue;
    return Finding{Status::fail, "property " + property.name,
                   fmt::format("{} is {:.17g}; it must be {} {:.17g} ({})", property.name, property.value,
                               symbol(property.relation), property.limit, property.derivation),
                   property.step, property.tensor};
  }
  return std::nullopt;
}

std::optional<Finding> check_something_checked(const Verdict& verdict) {
  if (!verdict.tensors.empty() || !verdict.properties.empty()) return std::nullopt;
  return Finding{
      Status::invalid, "sides", "the case gives neither a tensor to compare nor a property: nothing was checked", -1, {}};
}

// Keeps what came first; later findings still name the first bad tensor where the earlier ones named none.
void note(Verdict& verdict, const std::optional<Finding>& finding) {
  if (!finding) return;
  if (verdict.reason.empty()) {
    verdict.status = finding->status;
    verdict.check = finding->check;
    verdict.reason = finding->reason;
  }
  if (!verdict.first_bad_tensor && !finding->tensor.empty()) verdict.first_bad_tensor = finding->tensor;
  if (verdict.first_bad_step < 0) verdict.first_bad_step = finding->step;
}

}  // namespace

std::string_view name(Status status) {
  switch (status) {
    case Status::pass: return "pass";
    case Status::fail: return "fail";
    case Status::skip: return "skip";
    case Status::invalid: return "invalid";
  }
  return "?";
}

std::string_view name(Criterion criterion) {
  switch (criterion) {
    case Criterion::bitwise: return "bitwise";
    case Criterion::rounding: return "rounding";
    case Criterion::convergence: return "convergence";
  }
  return "?";
}

bool TensorVerdict::holds() const noexcept { return error <= bound; }

Verdict judge(Criterion criterion, const CaseEvidence& evidence, const PitfallSet& pitfalls) {
  Verdict verdict;
  verdict.status = Status::pass;
  verdict.criterion = criterion;
  verdict.properties = evidence.properties;
  const Sides sides = sides_of(criterion, evidence);

  note(verdict, check_sides(criterion, sides));
  const bool comparable = criterion != Criterion::convergence && sides.truth != nullptr && sides.candidate != nullptr;
  const std::optional<Finding> gap = check_completeness(criterion, sides);
  note(verdict, gap);
  if (!gap) note(verdict, check_liveness(sides));
  if (sides.candidate != nullptr) {
    const ReplicaVerdict replicas = check_replicas(*sides.candidate, pitfalls);
    verdict.ranks_judged = replicas.ranks_judged;
    note(verdict, replicas.finding);
  }
  if (comparable && !gap) {
    verdict.tensors = compare_tensors(criterion, sides, pitfalls);
    verdict.tensors_judged = static_cast<int>(verdict.tensors.size());
    note(verdict, check_tensors(verdict));
  }
  note(verdict, check_properties(verdict.properties));
  summarise_properties(verdict);
  note(verdict, check_something_checked(verdict));
  if (verdict.status == Status::pass) note(verdict, audit(verdict, sides));
  return verdict;
}

}  // namespace tandem
