// SPDX-License-Identifier: Apache-2.0
#include "reference/fp8.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "reference/binary_rounding.h"

namespace tandem::reference {

Fp8Format fp8_format(LinearOperand operand) noexcept {
  return operand == LinearOperand::output_gradient ? Fp8Format::e5m2 : Fp8Format::e4m3;
}

template <class Real>
Real fp8_rounded(Real value, Fp8Format format) {
  const auto most = static_cast<Real>(largest(format));
  const Real nearest = format == Fp8Format::e4m3 ? round_to_mantissa(value, 3, -6) : round_to_mantissa(value, 2, -14);
  return std::isnan(value) ? value : std::clamp(nearest, -most, most);
}

template <class Real>
std::vector<Real> fp8_quantized(std::span<const Real> x, Fp8Format format, double scale) {
  const auto factor = static_cast<Real>(scale);
  std::vector<Real> result;
  result.reserve(x.size());
  for (const Real value : x) result.push_back(fp8_rounded(value * factor, format) / factor);
  return result;
}

double fp8_scale(double amax, Fp8Format format, int margin) {
  TANDEM_CHECK(amax >= 0.0, "a largest absolute value is not negative");
  if (amax == 0.0) return 1.0;
  return std::ldexp(1.0, std::ilogb(static_cast<double>(largest(format)) / amax) - margin);
}

double Fp8Scaling::scale(const Fp8Tensor& tensor) const {
  const auto found = state_.find(tensor);
  if (found == state_.end() || found->second.amax.empty()) return 1.0;
  const std::deque<double>& amax = found->second.amax;
  return fp8_scale(*std::max_element(amax.begin(), amax.end()), fp8_format(tensor.operand), config_.margin);
}

template <class Real>
std::vector<Real> Fp8Scaling::quantize(const Fp8Tensor& tensor, std::span<const Real> x) {
  double& current = state_[tensor].current;
  for (const Real value : x) {
    if (std::isfinite(value)) current = std::max(current, std::abs(static_cast<double>(value)));
  }
  return fp8_quantized(x, fp8_format(tensor.operand), scale(tensor));
}

void Fp8Scaling::finish_step() {
  for (auto& [tensor, history] : state_) {
    history.amax.push_back(history.current);
    if (static_cast<int>(history.amax.size()) > config_.history) history.amax.pop_front();
    history.current = 0.0;
  }
}

template float fp8_rounded(float, Fp8Format);
template double fp8_rounded(double, Fp8Format);
template std::vector<float> fp8_quantized(std::span<const float>, Fp8Format, double);
template std::vector<double> fp8_quantized(std::span<const double>, Fp8Format, double);
template std::vector<float> Fp8Scaling::quantize(const Fp8Tensor&, std::span<const float>);
template std::vector<double> Fp8Scaling::quantize(const Fp8Tensor&, std::span<const double>);

}  // namespace tandem::reference
