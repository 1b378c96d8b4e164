// SPDX-License-Identifier: Apache-2.0
#include "harness/completeness.h"

#include <cmath>
#include <set>

#include <fmt/format.h>

namespace tandem {
namespace {

// fp8 (e5m2) has the largest unit roundoff of any training format, 2^-3.
constexpr double kLargestUnitRoundoff = 0.125;

Finding invalid(std::string check, std::string reason) { return {Status::invalid, std::move(check), std::move(reason), -1, {}}; }

std::optional<Finding> check_needed(Criterion criterion, const Sides& sides) {
  if (criterion == Criterion::convergence) return std::nullopt;
  if (sides.truth == nullptr) return invalid("sides", "the case gives no truth to compare with");
  if (sides.candidate == nullptr) return invalid("sides", "the case gives no candidate to judge");
  if (sides.truth->stages.empty())
    return invalid("sides", fmt::format("{} gives no stage: nothing was compared", sides.truth->side));
  return std::nullopt;
}

std::optional<Finding> check_identities(const Sides& sides) {
  for (const Evidence* side : sides.given()) {
    if (side->side.empty()) return invalid("sides", "a side has no name");
  }
  const auto shared = [](const Evidence* a, const Evidence* b) { return a != nullptr && b != nullptr && a->side == b->side; };
  // In the truth's own precision the reference is its own yardstick.
  const bool same_precision =
      sides.truth != nullptr && sides.candidate != nullptr && sides.truth->unit_roundoff == sides.candidate->unit_roundoff;
  if (shared(sides.truth, sides.candidate) || shared(sides.yardstick, sides.candidate) ||
      (shared(sides.truth, sides.yardstick) && !same_precision)) {
    return invalid("sides", fmt::format("two sides are the same one, '{}': it proves nothing to compare it with itself",
                                        shared(sides.truth, sides.candidate) ? sides.truth->side : sides.yardstick->side));
  }
  return std::nullopt;
}

std::optional<Finding> check_precisions(const Sides& sides) {
  for (const Evidence* side : sides.given()) {
    if (!(side->unit_roundoff > 0 && side->unit_roundoff <= kLargestUnitRoundoff)) {
      return invalid("sides", fmt::format("{} has unit roundoff {}; it must be in (0, 1/8]", side->side, side->unit_roundoff));
    }
  }
  const double candidate = sides.candidate->unit_roundoff;
  if (sides.truth->unit_roundoff > candidate) {
    return invalid("sides",
                   fmt::format("{} is less precise than {}, which it should judge", sides.truth->side, sides.candidate->side));
  }
  if (sides.yardstick == nullptr && sides.truth->unit_roundoff != candidate) {
    return invalid("sides", "the case gives no reference in the candidate's precision, so no bound can be derived");
  }
  if (sides.yardstick != nullptr && sides.yardstick->unit_roundoff != candidate) {
    return invalid("sides",
                   fmt::format("the yardstick {} is not in the precision of {}", sides.yardstick->side, sides.candidate->side));
  }
  return std::nullopt;
}

// A side that is part of the comparison fails; the reference being incomplete makes the comparison itself worthless.
Status status_for(const Sides& sides, const Evidence& side) { return &side == sides.candidate ? Status::fail : Status::invalid; }

std::optional<Finding> check_stage(Status status, const Evidence& side, const StageEvidence& expected,
                                   const StageEvidence& given) {
  const auto finding = [&](std::string reason, const std::string& tensor) {
    return Finding{status, "evidence", std::move(reason), expected.step, tensor};
  };
  for (const EvidenceTensor& tensor : expected.tensors) {
    const EvidenceTensor* twin = find_tensor(given, tensor.name);
    if (twin == nullptr) {
      return finding(fmt::format("{} gives no tensor {} in stage {}", side.side, tensor.name, expected.stage), tensor.name);
    }
    if (twin->values.size() != tensor.values.size()) {
      return finding(fmt::format("{} gives {} elements of {} in stage {}, not {}", side.side, twin->values.size(), tensor.name,
                                 expected.stage, tensor.values.size()),
                     tensor.name);
    }
  }
  for (const EvidenceTensor& tensor : given.tensors) {
    if (find_tensor(expected, tensor.name) == nullptr) {
      return finding(
          fmt::format("{} gives a tensor {} in stage {} that the truth does not have", side.side, tensor.name, expected.stage),
          tensor.name);
    }
  }
  return std::nullopt;
}

std::optional<Finding> check_structure(const Sides& sides, const Evidence& side) {
  const Status status = status_for(sides, side);
  for (const StageEvidence& expected : sides.truth->stages) {
    const StageEvidence* given = find_stage(side, expected.stage, expected.step);
    if (given == nullptr) {
      return Finding{status,
                     "evidence",
                     fmt::format("{} gives no stage {} of step {}", side.side, expected.stage, expected.step),
                     expected.step,
                     {}};
    }
    if (auto finding = check_stage(status, side, expected, *given)) return finding;
  }
  for (const StageEvidence& stage : side.stages) {
    if (find_stage(*sides.truth, stage.stage, stage.step) == nullptr) {
      return Finding{
          status,
          "evidence",
          fmt::format("{} gives a stage {} of step {} that the truth does not have", side.side, stage.stage, stage.step),
          stage.step,
          {}};
    }
  }
  return std::nullopt;
}

std::optional<Finding> check_unique(const Evidence& side) {
  std::set<std::pair<std::string, int>> stages;
  for (const StageEvidence& stage : side.stages) {
    if (!stages.emplace(stage.stage, stage.step).second) {
      return invalid("evidence", fmt::format("{} gives stage {} of step {} twice", side.side, stage.stage, stage.step));
    }
    if (stage.tensors.empty()) return invalid("evidence", fmt::format("{} gives no tensor in stage {}", side.side, stage.stage));
    std::set<std::string> names;
    for (const EvidenceTensor& tensor : stage.tensors) {
      if (!names.insert(tensor.name).second) {
        return invalid("evidence", fmt::format("{} gives tensor {} twice in stage {}", side.side, tensor.name, stage.stage));
      }
      if (!(tensor.reduction_length >= 1) || !std::isfinite(tensor.reduction_length)) {
        return invalid("evidence", fmt::format("{}: reduction length of {} in stage {} is {}; it must be at least 1", side.side,
                                               tensor.name, stage.stage, tensor.reduction_length));
      }
    }
  }
  return std::nullopt;
}

std::optional<Finding> check_finite(const Evidence& side) {
  for (const StageEvidence& stage : side.stages) {
    for (const EvidenceTensor& tensor : stage.tensors) {
      for (std::size_t i = 0; i < tensor.values.size(); ++i) {
        if (std::isfinite(tensor.values[i])) continue;
        return Finding{Status::fail, "finite",
                       fmt::format("{}: {} in stage {} was never written or is not finite (element {} is {})", side.side,
                                   tensor.name, stage.stage, i, tensor.values[i]),
                       stage.step, tensor.name};
      }
    }
  }
  for (std::size_t step = 0; step < side.losses.size(); ++step) {
    if (std::isfinite(side.losses[step])) continue;
    return Finding{Status::fail, "finite", fmt::format("{}: loss of step {} is {}", side.side, step, side.losses[step]),
                   static_cast<int>(step), "loss"};
  }
  return std::nullopt;
}

}  // namespace

Sides sides_of(Criterion criterion, const CaseEvidence& evidence) {
  const auto pointer = [](const std::optional<Evidence>& side) { return side ? &*side : nullptr; };
  return {pointer(evidence.truth), criterion == Criterion::bitwise ? nullptr : pointer(evidence.yardstick),
          pointer(evidence.candidate)};
}

const StageEvidence* find_stage(const Evidence& side, std::string_view stage, int step) {
  for (const StageEvidence& candidate : side.stages) {
    if (candidate.stage == stage && candidate.step == step) return &candidate;
  }
  return nullptr;
}

const StageEvidence* find_stage(const Evidence& side, std::string_view stage) {
  for (const StageEvidence& candidate : side.stages) {
    if (candidate.stage == stage) return &candidate;
  }
  return nullptr;
}

const EvidenceTensor* find_tensor(const StageEvidence& stage, std::string_view name) {
  for (const EvidenceTensor& tensor : stage.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

std::optional<Finding> check_sides(Criterion criterion, const Sides& sides) {
  if (auto finding = check_needed(criterion, sides)) return finding;
  if (auto finding = check_identities(sides)) return finding;
  return criterion == Criterion::rounding ? check_precisions(sides) : std::nullopt;
}

std::optional<Finding> check_completeness(Criterion criterion, const Sides& sides) {
  for (const Evidence* side : sides.given()) {
    if (auto finding = check_unique(*side)) return finding;
  }
  for (const Evidence* side : {sides.candidate, sides.yardstick}) {
    if (side == nullptr || sides.truth == nullptr || criterion == Criterion::convergence) continue;
    if (auto finding = check_structure(sides, *side)) return finding;
  }
  for (const Evidence* side : {sides.candidate, sides.yardstick, sides.truth}) {
    if (side == nullptr) continue;
    if (auto finding = check_finite(*side)) return finding;
  }
  return std::nullopt;
}

}  // namespace tandem
