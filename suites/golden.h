// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "core/io/golden_set.h"
#include "core/pitfall.h"
#include "core/plan.h"
#include "harness/evidence.h"
#include "optimized/machine.h"

namespace tandem {

/// One run of a golden set: what it was compared as, and each deviation with its limit (suites/golden_bounds.h).
struct GoldenOutcome {
  std::string side;  ///< "reference fp64", "engine bf16 data 3"
  std::vector<Property> properties;
  [[nodiscard]] bool passed() const noexcept;
  /// The property with the largest value over limit.
  [[nodiscard]] const Property& worst() const;
};

/// The reference in the plan's precision, against limits that hold a priori.
[[nodiscard]] GoldenOutcome run_golden_reference(const GoldenSet& set, const TrainingPlan& plan);

/// The engine under `plan`; start from golden_batch() for its batch. In 16 bits `reference`, what run_golden_reference() gave for
/// the same plan, is the yardstick; fp64 and fp32 do not look at it. Throws InputError where the plan does not fit the set.
[[nodiscard]] GoldenOutcome run_golden_engine(const GoldenSet& set, const TrainingPlan& plan, const MachineChoice& machine,
                                              const GoldenOutcome& reference);

/// The set's batch in a plan: all rows of a step, its number of micro-batches.
[[nodiscard]] GlobalBatch golden_batch(const GoldenSet& set);

}  // namespace tandem
