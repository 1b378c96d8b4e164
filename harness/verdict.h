// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/case.h"

namespace tandem {

enum class Status : std::uint8_t { pass, fail, skip, invalid };
[[nodiscard]] std::string_view name(Status status);

/// One tensor of one stage against its bound.
struct TensorVerdict {
  std::string stage;
  int step = 0;
  std::string tensor;
  double error = 0;  ///< of the candidate, relative to |truth| (or absolute, see below); bitwise: share of elements that differ
  double yardstick_error = 0;     ///< of the reference in the same precision
  double floor = 0;               ///< eps sqrt(K) (times the tensor's share of the whole norm when absolute)
  double bound = 0;               ///< 4 max(yardstick_error, floor); 0 for bitwise
  bool absolute = false;          ///< truth is (nearly) zero: errors are |x - truth|
  bool bitwise = false;           ///< every value must have the same bits
  std::int64_t worst_index = -1;  ///< element that differs most (bitwise: first); -1: none. Its values:
  double worst_value = 0, worst_truth = 0;
  [[nodiscard]] bool holds() const noexcept;  ///< !(error <= bound) is false; NaN fails
};

struct Verdict {
  Status status = Status::invalid;
  Criterion criterion = Criterion::rounding;
  std::string reason;  ///< one line; empty on pass
  std::string check;   ///< which check decided: "gradients", "replica_hashes", "liveness", "property NAME", "audit", ...
  /// Of the tensor with the largest error over bound; in a case without tensors, value and limit of its worst property.
  double error = 0, bound = 0;
  double error_over_bound = 0;  ///< infinite when anything differs under a bound of zero
  std::string worst_tensor, worst_stage;
  std::optional<std::string> first_bad_tensor;  ///< in execution order
  int first_bad_step = -1;
  int ranks_judged = 0;  ///< must equal the candidate's ranks
  int tensors_judged = 0;
  std::vector<TensorVerdict> tensors;
  std::vector<Property> properties;
};

/// Judges a case. Order:
///   1. sides: each has an identity of its own and a unit roundoff that suits its role; otherwise `invalid`
///   2. evidence: every stage and tensor of the truth is in the other sides, none is extra, sizes are equal, all is finite
///   3. liveness (`invalid`): gradients not all zero, parameters moved, losses change, inputs differ between parts of the batch
///   4. replicas equal by hash (harness/replicas.h)
///   5. tensors by the criterion
///   6. properties
///   7. audit of the verdict itself (`invalid`): every floor and bound is derived anew and must not exceed 4 max(yardstick,
///   floor),
///      every tensor and every rank was judged.
/// The first that does not hold decides status, check and reason. Tensors and properties are filled in whenever they can be.
///
/// Rounding. A tensor whose true norm is (nearly) zero is judged absolutely: |truth| < 64 eps share, or true_value_is_zero, with
/// share = sqrt(n / total) * norm of the whole stage; its floor is eps sqrt(K) share. Tensors with true_value_is_zero are judged
/// in the stages initial_parameters and gradients only.
///
/// Fault points (harness): bound_widened sets every bound to 5e-3; verdict_of_rank_zero looks at the replicas of rank 0 only.
[[nodiscard]] Verdict judge(Criterion criterion, const CaseEvidence& evidence, const PitfallSet& pitfalls);

}  // namespace tandem
