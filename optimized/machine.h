// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace tandem {

/// What the kernels run on here, and what they fell back from.
[[nodiscard]] KernelsInfo machine_kernels();

/// Measured fp32 matrix-product peak in FLOP/s with 1, 2, ... threads, up to the number of cores (at most 8). About a second
/// each.
[[nodiscard]] std::vector<double> matrix_peaks_by_threads();

}  // namespace tandem
