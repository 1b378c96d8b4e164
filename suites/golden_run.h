// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/io/golden_set.h"
#include "core/pitfall.h"
#include "core/plan.h"
#include "optimized/machine.h"

namespace tandem {

/// What a run of a golden set leaves behind, from either side. Tensors are whole, by global name; parameters are the master
/// copies.
struct GoldenRun {
  using Tensors = std::map<std::string, std::vector<double>>;
  std::vector<double> losses, norms, coefficients;  ///< [steps]
  int skipped_steps = 0;                            ///< for an overflow; a golden trajectory skips none
  Tensors gradients_step0, parameters_step1, parameters_last, first_moments, second_moments;
};

/// The reference in the plan's numerics: in double for fp64, else in float, rounding where the plan's precision rounds. In 16
/// bits its rows are dealt as the plan deals them, over data ranks and micro-batches; otherwise one rank works on the set's
/// micro-batches.
[[nodiscard]] GoldenRun golden_reference_run(const GoldenSet& set, const TrainingPlan& plan);

/// The engine on the plan's ranks. Fresh memory is poisoned. Throws InputError where the plan does not fit the set.
[[nodiscard]] GoldenRun golden_engine_run(const GoldenSet& set, const TrainingPlan& plan, const MachineChoice& machine);

/// Whether something is narrower than fp32: in storage, or on its way into products.
[[nodiscard]] bool is_narrow(const Numerics& numerics);

}  // namespace tandem
