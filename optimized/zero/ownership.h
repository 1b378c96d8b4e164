// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan.h"
#include "core/process_grid.h"
#include "core/shard.h"
#include "optimized/data_parallel/buckets.h"
#include "optimized/hybrid_parallel/parameter_layout.h"

namespace tandem {

/// What a rank keeps of one of its local tensors when its replicas share the keeping (ZeRO): a flat range. Without ZeRO the whole
/// tensor.
struct OwnedPart {
  std::size_t parameter = 0;  ///< index in the rank's local parameters
  int unit = 0;
  Interval elements;    ///< of the local tensor, flat
  std::int64_t at = 0;  ///< of its first element in buffers that hold owned parts alone
  ShardSpec shard;      ///< with flat_range under ZeRO; its replicas are the ranks that keep the same part
};

/// Who keeps what (docs/techniques/zero.md). Every unit (parameter_units()) is dealt to the n ranks that hold the same parameters
/// by balanced_part(elements, n, rank of the group); without ZeRO, n is 1.
struct Ownership {
  std::vector<GradientBucket> units;  ///< in backward order
  std::vector<int> ranks;             ///< [units] n
  std::vector<Interval> owned;        ///< [units] of the unit's elements, here
  std::vector<std::int64_t> at;       ///< [units] first owned element in buffers of parts; units in ascending flat order
  std::vector<int> unit_of;           ///< [parameters]
  std::vector<OwnedPart> parts;       ///< in the order of parameters; none empty
  std::int64_t elements = 0;          ///< of all parts

  /// Of the elements `range` of the flat order, those kept here.
  [[nodiscard]] std::int64_t kept(Interval range) const;
};
[[nodiscard]] Ownership ownership(const std::vector<LocalParameter>& parameters, const TrainingPlan& plan,
                                  const ProcessGrid& grid, int rank);

}  // namespace tandem
