// SPDX-License-Identifier: Apache-2.0
#include "harness/equivalence.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tandem {
namespace {

constexpr double kNearlyZero = 64;  // in units of eps times the tensor's share of the stage
constexpr double kWidenedBound = 5e-3;

double norm(const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares);
}

bool same_bits(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }

void note_worst(TensorVerdict& verdict, const EvidenceTensor& truth, const EvidenceTensor& candidate, std::size_t index) {
  verdict.worst_index = static_cast<std::int64_t>(index);
  verdict.worst_value = candidate.values[index];
  verdict.worst_truth = truth.values[index];
}

void compare_bitwise(TensorVerdict& verdict, const EvidenceTensor& truth, const EvidenceTensor& candidate) {
  verdict.bitwise = true;
  std::size_t differing = 0;
  for (std::size_t i = 0; i < truth.values.size(); ++i) {
    if (same_bits(truth.values[i], candidate.values[i])) continue;
    if (differing == 0) note_worst(verdict, truth, candidate, i);
    ++differing;
  }
  if (differing > 0) verdict.error = static_cast<double>(differing) / static_cast<double>(truth.values.size());
}

void compare_rounding(TensorVerdict& verdict, const StageScale& scale, const EvidenceTensor& truth,
                      const EvidenceTensor* yardstick, const EvidenceTensor& candidate, double unit_roundoff) {
  verdict.absolute = is_judged_absolutely(scale, truth, unit_roundoff);
  const double unit = verdict.absolute ? 1 : norm(truth.values);
  verdict.error = distance(candidate.values, truth.values) / unit;
  verdict.yardstick_error = yardstick == nullptr ? 0 : distance(yardstick->values, truth.values) / unit;
  verdict.floor = rounding_floor(scale, truth, unit_roundoff);
  verdict.bound = rounding_bound(verdict.yardstick_error, verdict.floor);
  double worst = 0;
  for (std::size_t i = 0; i < truth.values.size(); ++i) {
    const double difference = std::abs(candidate.values[i] - truth.values[i]);
    if (difference <= worst) continue;
    worst = difference;
    note_worst(verdict, truth, candidate, i);
  }
}

}  // namespace

double StageScale::share(double n) const { return num_elements > 0 ? std::sqrt(n / num_elements) * norm : 0; }

StageScale scale_of(const StageEvidence& stage) {
  double squares = 0;
  StageScale scale;
  for (const EvidenceTensor& tensor : stage.tensors) {
    scale.num_elements += static_cast<double>(tensor.values.size());
    for (const double value : tensor.values) squares += value * value;
  }
  scale.norm = std::sqrt(squares);
  return scale;
}

bool is_judged(Criterion criterion, const StageEvidence& stage, const EvidenceTensor& truth) {
  return !truth.true_value_is_zero || criterion == Criterion::bitwise || stage.stage == kInitialParameters ||
         stage.stage == kGradients;
}

bool is_judged_absolutely(const StageScale& scale, const EvidenceTensor& truth, double unit_roundoff) {
  const double size = norm(truth.values);
  return truth.true_value_is_zero || size == 0 ||
         size < kNearlyZero * unit_roundoff * scale.share(static_cast<double>(truth.values.size()));
}

double rounding_floor(const StageScale& scale, const EvidenceTensor& truth, double unit_roundoff) {
  const double relative = unit_roundoff * std::sqrt(truth.reduction_length);
  return is_judged_absolutely(scale, truth, unit_roundoff) ? relative * scale.share(static_cast<double>(truth.values.size()))
                                                           : relative;
}

double rounding_bound(double yardstick_error, double floor) { return 4 * std::max(yardstick_error, floor); }

std::vector<TensorVerdict> compare_tensors(Criterion criterion, const Sides& sides, const PitfallSet& pitfalls) {
  std::vector<TensorVerdict> verdicts;
  for (const StageEvidence& stage : sides.truth->stages) {
    const StageEvidence& candidate_stage = *find_stage(*sides.candidate, stage.stage, stage.step);
    const StageEvidence* yardstick_stage =
        sides.yardstick == nullptr ? nullptr : find_stage(*sides.yardstick, stage.stage, stage.step);
    const StageScale scale = scale_of(stage);
    for (const EvidenceTensor& truth : stage.tensors) {
      if (!is_judged(criterion, stage, truth)) continue;
      const EvidenceTensor& candidate = *find_tensor(candidate_stage, truth.name);
      TensorVerdict verdict;
      verdict.stage = stage.stage;
      verdict.step = stage.step;
      verdict.tensor = truth.name;
      if (criterion == Criterion::bitwise || stage.stage == kInitialParameters) {
        compare_bitwise(verdict, truth, candidate);
      } else {
        const EvidenceTensor* yardstick = yardstick_stage == nullptr ? nullptr : find_tensor(*yardstick_stage, truth.name);
        compare_rounding(verdict, scale, truth, yardstick, candidate, sides.candidate->unit_roundoff);
      }
      // A limit set to what the noise happens to be, instead of one that is derived, lets small faults pass.
      if (pitfalls.on(Pitfall::bound_widened)) verdict.bound = kWidenedBound;
      verdicts.push_back(std::move(verdict));
    }
  }
  return verdicts;
}

double error_over_bound(const TensorVerdict& tensor) {
  if (tensor.error == 0) return 0;
  const double ratio = tensor.error / tensor.bound;
  return std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
}

}  // namespace tandem
