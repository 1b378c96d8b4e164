// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

namespace tandem::reference {

/// The nearest number with `mantissa_bits` bits after the leading one, ties to even. Below 2^least_exponent numbers keep the
/// spacing that they have there, down to 0: subnormal numbers. No upper limit. NaN and infinities stay.
template <class Real>
[[nodiscard]] Real round_to_mantissa(Real value, int mantissa_bits, int least_exponent) {
  if (value == Real{0} || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), least_exponent);
  const Real quantum = std::ldexp(Real{1}, exponent - mantissa_bits);
  return std::nearbyint(value / quantum) * quantum;
}

}  // namespace tandem::reference
