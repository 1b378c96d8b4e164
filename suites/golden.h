// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "core/io/golden_set.h"
#include "core/pitfall.h"
#include "core/plan.h"
#include "harness/evidence.h"

namespace tandem {

/// One run of a golden set: what it was compared as, and each deviation with its limit.
///   fp64  loss and norm 1e-9 relative, tensors 1e-8 of their norm (6e-8 where the set stores them as float32)
///   fp32  ten times the deviation that the set states for its own program run in float32
struct GoldenOutcome {
  std::string side;  ///< "reference fp64", "engine fp32 data 3"
  std::vector<Property> properties;
  [[nodiscard]] bool passed() const noexcept;
  /// The property with the largest value over limit.
  [[nodiscard]] const Property& worst() const;
};

/// precision: "fp32" or "fp64". Throws InputError for others.
[[nodiscard]] GoldenOutcome run_golden_reference(const GoldenSet& set, const std::string& precision);

/// The engine under `plan`; start from golden_batch() for its batch. Throws InputError where the plan does not fit the set.
[[nodiscard]] GoldenOutcome run_golden_engine(const GoldenSet& set, TrainingPlan plan, const PitfallSet& pitfalls);

/// The set's batch in a plan: all rows of a step, its number of micro-batches.
[[nodiscard]] GlobalBatch golden_batch(const GoldenSet& set);

}  // namespace tandem
