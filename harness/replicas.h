// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "core/pitfall.h"
#include "harness/finding.h"

namespace tandem {

struct ReplicaVerdict {
  /// Status fail: copies that must be equal are not. Of the first stage, and in it the first tensor, in order of appearance;
  /// names the ranks whose copy is not that of the majority (of equally many: not that of the lowest rank), the part and the
  /// stage. Status invalid: there is nothing to judge by, or a rank is missing.
  std::optional<Finding> finding;
  int ranks_judged = 0;  ///< ranks of which a hash was looked at; the audit wants all
};

/// Judges Evidence::replica_hashes and Evidence::replicas of one side; both where both are given.
/// Fault point: verdict_of_rank_zero looks at rank 0 alone.
[[nodiscard]] ReplicaVerdict check_replicas(const Evidence& candidate, const PitfallSet& pitfalls);

}  // namespace tandem
