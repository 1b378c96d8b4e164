// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "core/plan.h"
#include "kernels/kernels.h"

namespace tandem {

/// The kernels that a rank of this plan computes with.
[[nodiscard]] std::unique_ptr<Kernels> make_kernels(const TrainingPlan& plan, const PitfallSet& pitfalls = {});

/// What the kernels run on here, and what they fell back from.
[[nodiscard]] KernelsInfo machine_kernels();

/// Measured fp32 matrix-product peak in FLOP/s with 1, 2, ... threads, up to the number of cores (at most 8). About a second
/// each.
[[nodiscard]] std::vector<double> matrix_peaks_by_threads();

}  // namespace tandem
