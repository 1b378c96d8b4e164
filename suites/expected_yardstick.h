// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "suites/pair.h"

namespace tandem {

/// The reference in the plan's precision, with the error to expect instead of the one that it happens to have.
///
/// The error of a gradient of few elements is one draw of something random: where rounding is amplified, as in a sum whose terms
/// cancel, |error| / |sum| = eps |terms| / |sum|, the reference's draw may be near zero by chance, and says nothing of how large
/// the engine's, drawn likewise, may be. Neighbours (PairInputs::neighbour) amplify alike and round independently. So, for each
/// element, with t and y the reference in double and in the plan's precision at neighbours k = 0 (the plan itself) to n:
///
///   yardstick = t_0 + sqrt(mean over k of (y_k - t_k)^2)          |yardstick - t_0| = root mean square of |y_k - t_k|
///
/// n = kNeighbours, less those whose routing comes near a tie or which overflow otherwise: they compute something else. In fp64
/// y is fp32 (see errors_of_double()). `truth` is reference_evidence<double>(inputs, 1, 1).
[[nodiscard]] Evidence expected_yardstick(const PairInputs& inputs, const Evidence& truth);
inline constexpr int kNeighbours = 8;

}  // namespace tandem
