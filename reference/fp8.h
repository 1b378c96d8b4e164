// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/plan.h"

/// Eight-bit operands of linear layers with delayed per-tensor scaling: the scale of this step follows from the largest values of
/// the steps before, so that no tensor is read twice.
namespace tandem::reference {

/// The operands of y = x W + b and of its backward pass: x, W and dy.
enum class LinearOperand : std::uint8_t { input, weight, output_gradient };

/// e4m3 (finer) for inputs and weights, e5m2 (wider) for gradients.
[[nodiscard]] Fp8Format fp8_format(LinearOperand operand) noexcept;

/// The fp8 number nearest to `value`, ties to even, saturating; NaN stays NaN.
template <class Real>
[[nodiscard]] Real fp8_rounded(Real value, Fp8Format format);

/// xq = fp8(x scale) / scale, element by element. The scale being a power of two, xq differs from an fp8 number in its exponent
/// alone.
template <class Real>
[[nodiscard]] std::vector<Real> fp8_quantized(std::span<const Real> x, Fp8Format format, double scale);

/// 2^(floor(log2(largest(format) / amax)) - margin): amax lands in the topmost binade of the format, `margin` powers of two below
/// it. 1 where amax is 0.
[[nodiscard]] double fp8_scale(double amax, Fp8Format format, int margin);

/// One operand of one linear layer, "h.0.attn.c_attn".
struct Fp8Tensor {
  std::string layer;
  LinearOperand operand;
  friend auto operator<=>(const Fp8Tensor&, const Fp8Tensor&) = default;
};

/// What is remembered of one tensor.
struct Fp8History {
  std::deque<double> amax;  ///< largest absolute value of each of the last steps, oldest first; at most `history` of them
  double current = 0.0;     ///< of the running step, over its micro-batches and ranks
  friend bool operator==(const Fp8History&, const Fp8History&) = default;
};

/// The state machine:
///   in a step: every micro-batch and rank quantises with scale(); current <- max(current, max |x|)
///   its end:   current is appended to the history, whose oldest entry goes when there are more than `history`; current <- 0
///   scale = fp8_scale(largest entry of the history); 1 with an empty history
/// A step that is skipped for an overflow ends like any other. Elements that are not finite take no part in max |x|: one bad step
/// would otherwise leave no scale for the next `history` ones.
class Fp8Scaling {
 public:
  explicit Fp8Scaling(const Fp8Config& config) : config_(config) {}

  /// What `tensor` is multiplied by in this step.
  [[nodiscard]] double scale(const Fp8Tensor& tensor) const;
  /// fp8_quantized() with that scale; looks at x for the steps to come.
  template <class Real>
  [[nodiscard]] std::vector<Real> quantize(const Fp8Tensor& tensor, std::span<const Real> x);
  void finish_step();

  /// Of every tensor that has been quantised: what a checkpoint saves and restores.
  [[nodiscard]] const std::map<Fp8Tensor, Fp8History>& state() const noexcept { return state_; }
  void restore(std::map<Fp8Tensor, Fp8History> state) { state_ = std::move(state); }

 private:
  Fp8Config config_;
  std::map<Fp8Tensor, Fp8History> state_;
};

}  // namespace tandem::reference
