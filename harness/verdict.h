// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
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
  double error = 0;            ///< of the candidate, relative to |truth| (or absolute, see below)
  double yardstick_error = 0;  ///< of the reference in the same precision
  double floor = 0;            ///< eps sqrt(K) (times the tensor's share of the whole norm when absolute)
  double bound = 0;            ///< 4 max(yardstick_error, floor); 0 for bitwise
  bool absolute = false;       ///< truth is (nearly) zero: errors are |x - truth|
  std::int64_t worst_index = -1;  ///< element that differs most, its values:
  double worst_value = 0, worst_truth = 0;
  [[nodiscard]] bool holds() const noexcept;  ///< !(error <= bound) is false; NaN fails
};

struct Verdict {
  Status status = Status::invalid;
  Criterion criterion = Criterion::rounding;
  std::string reason;            ///< one line; empty on pass
  std::string check;             ///< which check decided: "gradients", "replica_hashes", "liveness", "property NAME", "audit", ...
  double error = 0, bound = 0;   ///< of the tensor with the largest error over bound
  double error_over_bound = 0;
  std::string worst_tensor, worst_stage;
  std::optional<std::string> first_bad_tensor;  ///< in execution order
  int first_bad_step = -1;
  int ranks_judged = 0;          ///< must equal the candidate's ranks
  std::vector<TensorVerdict> tensors;
  std::vector<Property> properties;
};

/// Judges a case. Order: nothing missing (every stage and tensor of the truth is in the candidate, sizes equal, all finite) ->
/// liveness (parameters moved, gradients not all zero, losses change, inputs differ between ranks; otherwise `invalid`) -> replicas
/// equal by hash -> tensors by the criterion -> properties. Then audits its own verdict: every bound is recomputed from the stored
/// errors and must not exceed 4 max(yardstick, floor), and ranks_judged must be all; otherwise `invalid`.
///
/// Fault points (harness): bound_widened sets every bound to 5e-3; verdict_of_rank_zero looks at replica hash 0 only.
[[nodiscard]] Verdict judge(Criterion criterion, const CaseEvidence& evidence, const PitfallSet& pitfalls);

}  // namespace tandem
