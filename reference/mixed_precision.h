// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "reference/fp8.h"
#include "reference/ops.h"
#include "reference/tensors.h"

/// Training in 16 bits as a definition. Arithmetic stays in Real; what 16 bits do is said by where numbers are rounded:
///   storage 16 bits   every tensor at rest is rounded once, when it is stored: embeddings (the sum of both tables, and again
///                     after dropout), outputs of norms, of linear layers, of GELU and of attention, residual sums, logits; in
///                     the backward pass the gradient of each. Statistics, sums and the loss are not.
///   autocast          nothing at rest is rounded, but the operands of linear layers and of the head on their way into a product
///   fp8               storage as above, and operands of the linear layers inside blocks are fp8 numbers (reference/fp8.h)
/// Parameters at rest are the rounded master parameters.
namespace tandem::reference {

/// `value` rounded to bf16 or fp16: to nearest, ties to even, overflow to infinity. Every other dtype stands for Real: the value
/// stays.
template <class Real>
[[nodiscard]] Real rounded(Real value, DType dtype);
template <class Real>
void round_all(DType dtype, std::span<Real> values);
template <class Real>
void round_all(DType dtype, NamedTensors<Real>& tensors);
template <class Real>
[[nodiscard]] std::vector<Real> rounded_copy(DType dtype, std::span<const Real> values);

/// What is rounded in a pass. By default nothing is.
struct Rounding {
  DType storage = DType::f32;   ///< of tensors at rest
  DType products = DType::f32;  ///< of operands on their way into a product
  bool probabilities = false;   ///< those of attention are at rest too, as attention=materialized keeps them
  Fp8Scaling* fp8 = nullptr;    ///< borrowed; where given, linear layers inside blocks quantise their operands with it

  [[nodiscard]] Rounding without_fp8() const noexcept { return {storage, products, probabilities, nullptr}; }
};
/// `fp8` is taken where the numerics want it.
[[nodiscard]] Rounding rounding_of(const Numerics& numerics, Fp8Scaling* fp8 = nullptr);

/// y = round(Q(x) Q(W) + b): Q reads an operand as `rounding` says, round is to its storage. `layer` names the layer for fp8.
/// Sizes as of linear_forward().
template <class Real>
void rounded_linear_forward(const Rounding& rounding, const std::string& layer, LinearSize size, std::span<const Real> x,
                            std::span<const Real> weight, std::span<const Real> bias, std::span<Real> y,
                            MultiplyAdds* count = nullptr);
/// dx = round(Q(dy) Q(W)^T), dW += Q(x)^T Q(dy), db += sum over rows of dy. dbias may be empty.
template <class Real>
void rounded_linear_backward(const Rounding& rounding, const std::string& layer, LinearSize size, std::span<const Real> x,
                             std::span<const Real> weight, std::span<const Real> dy, std::span<Real> dx, std::span<Real> dweight,
                             std::span<Real> dbias, MultiplyAdds* count = nullptr);

/// What a forward pass reads: the master parameters, rounded to the storage.
template <class Real>
[[nodiscard]] NamedTensors<Real> stored_parameters(const Numerics& numerics, const NamedTensors<Real>& master);

/// sum <- rounded(sum + part): one micro-batch's gradients added to those before. `dtype` is what they are kept in.
template <class Real>
void accumulate_gradients(DType dtype, const NamedTensors<Real>& part, NamedTensors<Real>& sum);

/// Whether every element of every tensor is finite. A step whose gradients are not has overflowed.
template <class Real>
[[nodiscard]] bool all_finite(const NamedTensors<Real>& tensors);

/// g <- g / loss_scale.
template <class Real>
void unscale(NamedTensors<Real>& gradients, double loss_scale);

/// What rounding to few bits does to the nonzero elements of some tensors.
struct UnderflowShare {
  double zero = 0.0;          ///< share of them that becomes 0
  double subnormal = 0.0;     ///< share that stays, but below the smallest normal number: with fewer bits than the rest
  std::int64_t elements = 0;  ///< how many nonzero elements there are
  double infinite = 0.0;      ///< share that becomes infinite, or was not finite before
};
/// Of scale * x for every element x, rounded to `dtype` (bf16 or fp16; others throw ContractError).
template <class Real>
[[nodiscard]] UnderflowShare underflow_share(const NamedTensors<Real>& tensors, DType dtype, double scale = 1.0);

}  // namespace tandem::reference
