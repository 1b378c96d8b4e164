// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/io/golden_set.h"
#include "core/plan.h"
#include "harness/evidence.h"
#include "suites/golden_run.h"

/// Limits of the deviations from a golden set, all of them derived; docs/techniques/loss_scaling.md, "Golden sets in 16 bits".
namespace tandem {

/// Every deviation of `run` from the set, without limits: loss, grad_norm and clip_coef of each step, then for each result file
/// and each tensor its own and that of its summary; last the number of skipped steps. The same order for every run of a set.
[[nodiscard]] std::vector<Property> golden_deviations(const GoldenSet& set, const GoldenRun& run);

/// fp64: 1e-9 in series, 1e-8 in tensors (6e-8 where the set stores them in float32). fp32: ten times what the set states for its
/// own program in float32; for parameters at least what a gradient error of 4 eps sqrt(K) moves in the first update.
void limit_wide(const GoldenSet& set, const Numerics& numerics, std::vector<Property>& deviations);

/// A priori, whatever the implementation. Each of N roundings on the path from a parameter to the loss and back makes the number
/// that is rounded wrong by c u, c = 1 / sqrt(8 ln 2) = 0.42 on the average over a binade; independent errors add as squares:
///   gradients      4 sigma_g, sigma_g = c sqrt(sum of u^2 over all N roundings)
///   loss           4 sigma_z rms(logits) / loss: forward roundings alone, no cancellation between tokens; |softmax - target| <=
///   1 norm, clip     4 sigma_g
/// and after updates what such gradients move (suites/golden_movement.h).
void limit_narrow_reference(const GoldenSet& set, const TrainingPlan& plan, std::vector<Property>& deviations);

/// The reference in the same precision is the yardstick; the limit a priori holds as well, so the smaller counts:
///   gradients      4 max(error of the reference, u): sums have fp32 terms, a 16-bit number at rest has one rounding
///   moments        4 error of the reference, or what gradients as wrong as that make of them
///   parameters     the limit a priori alone: which elements take their update the wrong way is luck on either side
///   loss, norm, clip   4 max(largest error of the reference up to this step, sigma / sqrt(tokens)): one number may be right by
///                      luck; roundings of different tokens are independent
/// `reference`: its deviations, in the same order.
void limit_narrow_engine(const GoldenSet& set, const TrainingPlan& plan, const std::vector<Property>& reference,
                         std::vector<Property>& deviations);

/// Relative errors that roundings alone are expected to cause in a step.
struct RoundingErrors {
  double loss = 0;        ///< absolute error of a logit over rms(logits): sqrt of the forward terms
  double gradients = 0;   ///< relative, of a tensor
  double persistent = 0;  ///< share of gradients^2 that comes from weights at rest: the same in all steps
};
[[nodiscard]] RoundingErrors expected_rounding_errors(const GptConfig& model, const TrainingPlan& plan);

}  // namespace tandem
