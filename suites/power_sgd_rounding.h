// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "reference/compressed_reduction.h"

namespace tandem {

/// What the roundings of one power_sgd step are relative to, squared, by the equation (reference/compression.h), u sqrt(K) being
/// the error of a sum of K products over the root of the sum of their squares.
///   |C_n|                                  what a residual C_n - p p^T C_n is the difference of
///   t_j = sqrt(sum |C_n|^2) |q_j| / N / |l_j|   error of P_j = mean of C_n q_j, whose terms may cancel, over l_j, what of it is
///                                          left beside the earlier directions: by so much p_j is turned, in units of u sqrt(K)
///   t_j (|p_j^T C_n|, |C_n - p p^T C_n|)   what that makes of p p^T C_n, in the direction itself and in the one it is turned to
struct PowerSgdRounding {
  std::vector<double> residuals;  ///< [ranks] |C_n|^2 + sum over j of t_j^2 (|p_j^T C_n|^2 + |C_n - p p^T C_n|^2)
  double sum = 0;                 ///< sum of |C_n|^2 + the same of the sum of C_n
};

/// `corrected`: [ranks][rows, columns] C_n = gradient + residual. `start`: [rank, columns] q. Directions that are dropped as
/// dependent turn nothing.
[[nodiscard]] PowerSgdRounding power_sgd_rounding(const reference::CodedTensor& tensor,
                                                  const std::vector<std::vector<double>>& corrected,
                                                  std::span<const double> start);

}  // namespace tandem
