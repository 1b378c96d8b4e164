// SPDX-License-Identifier: Apache-2.0
#include "reference/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/binary_rounding.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// A floating-point format: bits after the leading one, exponent of the smallest normal number, largest number.
struct BinaryFormat {
  int mantissa_bits;
  int least_exponent;
  double largest;
};

BinaryFormat format_of(DType dtype) {
  if (dtype == DType::f16) return {10, -14, 65504.0};
  TANDEM_CHECK(dtype == DType::bf16, fmt::format("{} has no 16 bits", name(dtype)));
  return {7, -126, 0x1.FEp127};
}

/// What the product of layer `layer` reads of one of its operands.
template <class Real>
std::vector<Real> product_operand(const Rounding& rounding, const std::string& layer, LinearOperand which,
                                  std::span<const Real> values) {
  if (rounding.fp8 != nullptr) return rounding.fp8->quantize<Real>({layer, which}, values);
  return rounded_copy(rounding.products, values);
}

}  // namespace

template <class Real>
Real rounded(Real value, DType dtype) {
  if (!is_16bit(dtype)) return value;
  // The same for floats, and several times as fast.
  if constexpr (std::is_same_v<Real, float>) return round_to(value, dtype);
  const BinaryFormat format = format_of(dtype);
  const Real nearest = round_to_mantissa(value, format.mantissa_bits, format.least_exponent);
  const bool overflows = std::abs(nearest) > static_cast<Real>(format.largest);
  return overflows ? std::copysign(std::numeric_limits<Real>::infinity(), value) : nearest;
}

template <class Real>
void round_all(DType dtype, std::span<Real> values) {
  if (!is_16bit(dtype)) return;
  for (Real& value : values) value = rounded(value, dtype);
}

template <class Real>
void round_all(DType dtype, NamedTensors<Real>& tensors) {
  for (auto& [name, values] : tensors) round_all<Real>(dtype, values);
}

template <class Real>
std::vector<Real> rounded_copy(DType dtype, std::span<const Real> values) {
  std::vector<Real> copy(values.begin(), values.end());
  round_all<Real>(dtype, copy);
  return copy;
}

Rounding rounding_of(const Numerics& numerics, Fp8Scaling* fp8) {
  return {.storage = numerics.storage, .products = numerics.compute, .fp8 = numerics.fp8 ? fp8 : nullptr};
}

template <class Real>
void rounded_linear_forward(const Rounding& rounding, const std::string& layer, LinearSize size, std::span<const Real> x,
                            std::span<const Real> weight, std::span<const Real> bias, std::span<Real> y, MultiplyAdds* count) {
  const std::vector<Real> x_read = product_operand(rounding, layer, LinearOperand::input, x);
  const std::vector<Real> weight_read = product_operand(rounding, layer, LinearOperand::weight, weight);
  linear_forward<Real>(size, x_read, weight_read, bias, y, count);
  round_all(rounding.storage, y);
}

template <class Real>
void rounded_linear_backward(const Rounding& rounding, const std::string& layer, LinearSize size, std::span<const Real> x,
                             std::span<const Real> weight, std::span<const Real> dy, std::span<Real> dx, std::span<Real> dweight,
                             std::span<Real> dbias, MultiplyAdds* count) {
  const std::vector<Real> x_read = product_operand(rounding, layer, LinearOperand::input, x);
  const std::vector<Real> weight_read = product_operand(rounding, layer, LinearOperand::weight, weight);
  const std::vector<Real> dy_read = product_operand(rounding, layer, LinearOperand::output_gradient, dy);
  linear_backward<Real>(size, x_read, weight_read, dy_read, dx, dweight, {}, count);
  round_all(rounding.storage, dx);
  // A sum, not a product: it takes dy as it is.
  if (!dbias.empty()) bias_backward<Real>(dy, dbias);
}

template <class Real>
NamedTensors<Real> stored_parameters(const Numerics& numerics, const NamedTensors<Real>& master) {
  NamedTensors<Real> stored = master;
  round_all(numerics.storage, stored);
  return stored;
}

template <class Real>
void accumulate_gradients(DType dtype, const NamedTensors<Real>& part, NamedTensors<Real>& sum) {
  for (auto& [name, values] : sum) {
    const std::span<const Real> added = tensor(part, name);
    require_size(added, static_cast<std::int64_t>(values.size()), name);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = rounded(values[i] + added[i], dtype);
  }
}

template <class Real>
bool all_finite(const NamedTensors<Real>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& named) {
    return std::all_of(named.second.begin(), named.second.end(), [](Real value) { return std::isfinite(value); });
  });
}

template <class Real>
void unscale(NamedTensors<Real>& gradients, double loss_scale) {
  for (auto& [name, values] : gradients) {
    for (Real& value : values) value /= static_cast<Real>(loss_scale);
  }
}

template <class Real>
UnderflowShare underflow_share(const NamedTensors<Real>& tensors, DType dtype, double scale) {
  const double smallest_normal = std::ldexp(1.0, format_of(dtype).least_exponent);
  std::int64_t zero = 0, subnormal = 0, infinite = 0;
  UnderflowShare share;
  for (const auto& [name, values] : tensors) {
    for (const Real value : values) {
      if (value == Real{0}) continue;
      ++share.elements;
      const double kept = std::abs(rounded(static_cast<double>(value) * scale, dtype));
      if (kept == 0.0) ++zero;
      if (kept > 0.0 && kept < smallest_normal) ++subnormal;
      if (!std::isfinite(kept)) ++infinite;
    }
  }
  if (share.elements == 0) return share;
  const auto share_of = [&](std::int64_t count) { return static_cast<double>(count) / static_cast<double>(share.elements); };
  share.zero = share_of(zero);
  share.subnormal = share_of(subnormal);
  share.infinite = share_of(infinite);
  return share;
}

template float rounded(float, DType);
template double rounded(double, DType);
template void round_all(DType, std::span<float>);
template void round_all(DType, std::span<double>);
template void round_all(DType, NamedTensors<float>&);
template void round_all(DType, NamedTensors<double>&);
template std::vector<float> rounded_copy(DType, std::span<const float>);
template std::vector<double> rounded_copy(DType, std::span<const double>);
template void rounded_linear_forward(const Rounding&, const std::string&, LinearSize, std::span<const float>,
                                     std::span<const float>, std::span<const float>, std::span<float>, MultiplyAdds*);
template void rounded_linear_forward(const Rounding&, const std::string&, LinearSize, std::span<const double>,
                                     std::span<const double>, std::span<const double>, std::span<double>, MultiplyAdds*);
template void rounded_linear_backward(const Rounding&, const std::string&, LinearSize, std::span<const float>,
                                      std::span<const float>, std::span<const float>, std::span<float>, std::span<float>,
                                      std::span<float>, MultiplyAdds*);
template void rounded_linear_backward(const Rounding&, const std::string&, LinearSize, std::span<const double>,
                                      std::span<const double>, std::span<const double>, std::span<double>, std::span<double>,
                                      std::span<double>, MultiplyAdds*);
template NamedTensors<float> stored_parameters(const Numerics&, const NamedTensors<float>&);
template NamedTensors<double> stored_parameters(const Numerics&, const NamedTensors<double>&);
template void accumulate_gradients(DType, const NamedTensors<float>&, NamedTensors<float>&);
template void accumulate_gradients(DType, const NamedTensors<double>&, NamedTensors<double>&);
template bool all_finite(const NamedTensors<float>&);
template bool all_finite(const NamedTensors<double>&);
template void unscale(NamedTensors<float>&, double);
template void unscale(NamedTensors<double>&, double);
template UnderflowShare underflow_share(const NamedTensors<float>&, DType, double);
template UnderflowShare underflow_share(const NamedTensors<double>&, DType, double);

}  // namespace tandem::reference
