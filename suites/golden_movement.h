// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/io/golden_set.h"

/// How far errors of gradients move a run of AdamW. An element whose gradient is near the error gets an update in any direction,
/// of full size: relative deviations of parameters say nothing about rounding unless this is taken off.
namespace tandem {

/// Relative error that the gradient of each tensor may have: |error| / |gradient|, L2. It lies on the elements of a matrix as
/// rms(row) rms(column) / rms of the gradient does, on those of a vector evenly.
using GradientErrors = std::map<std::string, double>;

/// By how much the first update can move tensor `name`, relative to |parameters after it|, when its gradient has the relative
/// error `error`. The update of an element is lr u(g), u(g) = g / (|g| + epsilon); with d its part of the error:
///   lr |max(|u(g + d) - u(g)|, |u(g - d) - u(g)|)| / |p|     g and d after clipping
/// The key third of attn.c_attn.bias is left out, as in every comparison.
[[nodiscard]] double first_update_movement(const GoldenSet& set, const std::string& name, double error);

/// What errors of gradients have done to a whole run, relative to the golden numbers.
struct GoldenMovement {
  std::map<std::string, double> parameters_step1, parameters_last, first_moments, second_moments;
  /// Of the summaries of parameters: the largest element may take its whole update the wrong way; and where every s-th element
  /// alone is stored, s of those that are not may do so while none of the others does.
  std::map<std::string, double> summary_step1, summary_last;
  std::vector<double> loss;  ///< [steps] relative
  /// [steps] by what factor the errors of gradients have grown, the parameters having moved
  std::vector<double> growth;
};

/// From the set's own numbers: gradients of step 0, both moments after the last step, parameters. With v_i the second moment
/// without its bias, sqrt(v_i) is the size of the gradient of element i over the run, and |u_i| = |m_i| / sqrt(v_i) that of its
/// update; with d the element's part of the error (rms of sqrt(v)), errors of gradients change update j by
///   du_i = min(2, (1 + |u_i|) d / sqrt(v_i))
/// (|dm| <= d, and sqrt(v) by as much). What n updates add up to: gradient j enters update k by (1 - b1) b1^(k-j) / (1 - b1^k);
/// c_j is the sum of that over k. The share `persistent` of error^2 is the same in all steps (weights at rest, rounded, hardly
/// change), the rest is new with every batch:
///   |dp| = lr |du| sqrt(persistent n^2 + (1 - persistent) sum of c_j^2),   and what the first update moves beside
/// Moments: |dm| <= error * |sqrt(v)| summed with the weights of m; dv likewise, 2 sqrt(v) d + d^2.
/// Loss: lr |sqrt(v) du| in the same way, signs being random over elements. Moved weights are wrong by rho = |dp| / |p|, as
/// if each of the 4 L + 2 matrices had been rounded once more on the way to the loss and back: error^2 grows by 2 (4 L + 2)
/// rho^2.
[[nodiscard]] GoldenMovement golden_movement(const GoldenSet& set, const GradientErrors& errors, double persistent);

}  // namespace tandem
