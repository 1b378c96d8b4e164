// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "optimized/probe/measure.h"

namespace tandem::probing {

/// Everything that one rank knows.
struct RankFigures {
  RankPlace place;
  NodeInventory node;
  MachineFigures machine;
  LinkFigures links;
  std::vector<StorageSample> storage;  ///< none or one
};

/// The report of what all ranks measured, in order of ranks. Throws what probe() throws.
[[nodiscard]] ProbeReport assemble(const std::vector<RankFigures>& ranks, const ProbeOptions& options);

}  // namespace tandem::probing
