// SPDX-License-Identifier: Apache-2.0
// The headers beside this one are compiled once per instruction set (isa_*.cpp). Everything in them is in an unnamed namespace
// and calls nothing but itself and compiler built-ins: an inline function of the standard library, instantiated here with AVX-512
// code, could be the copy that the linker keeps for the whole program.
#pragma once

#include <cstdint>

namespace tandem::cpu {
namespace {

using Index = std::int64_t;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }
inline float magnitude(float x) { return __builtin_fabsf(x); }
inline double magnitude(double x) { return __builtin_fabs(x); }

/// e^x without branches, so that loops over it vectorise. x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 q(r), q interpolated
/// at Chebyshev nodes (relative error 1e-8 of e^r, a sixth of a unit roundoff); the factor 2^n in two halves, so that results
/// below the normal range and overflow to infinity come out right. NaN gives NaN. Error at most 2 ulp (see the test).
inline float exponential(float x) {
  x = x < -104.0F ? -104.0F : x;
  x = x > 89.0F ? 89.0F : x;
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
  const float shifted = x * 1.44269504F + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * 0.693145751953125F) - n * 1.4286068203094173e-06F;
  float q = 0x1.6d10fcp-10F;
  q = q * r + 0x1.120b62p-7F;
  q = q * r + 0x1.55551ap-5F;
  q = q * r + 0x1.5554dep-3F;
  q = q * r + 0.5F;
  const float power = 1.0F + (r + r * r * q);
  const std::uint32_t exponent = __builtin_bit_cast(std::uint32_t, shifted) - 0x4B400000U + 254U;
  const std::uint32_t half = exponent >> 1;
  return power * __builtin_bit_cast(float, half << 23) * __builtin_bit_cast(float, (exponent - half) << 23);
}

/// The same in double: q by Taylor's series to r^11, truncated below 4e-18.
inline double exponential(double x) {
  x = x < -746.0 ? -746.0 : x;
  x = x > 710.0 ? 710.0 : x;
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = x * 1.4426950408889634 + kShift;
  const double n = shifted - kShift;
  const double r = (x - n * 0x1.62e42fefap-1) - n * 1.6465949582897082e-12;
  double q = 1.0 / 6227020800.0;
  q = q * r + 1.0 / 479001600.0;
  q = q * r + 1.0 / 39916800.0;
  q = q * r + 1.0 / 3628800.0;
  q = q * r + 1.0 / 362880.0;
  q = q * r + 1.0 / 40320.0;
  q = q * r + 1.0 / 5040.0;
  q = q * r + 1.0 / 720.0;
  q = q * r + 1.0 / 120.0;
  q = q * r + 1.0 / 24.0;
  q = q * r + 1.0 / 6.0;
  q = q * r + 0.5;
  const double power = 1.0 + (r + r * r * q);
  const std::uint64_t exponent = __builtin_bit_cast(std::uint64_t, shifted) - 0x4338000000000000U + 2046U;
  const std::uint64_t half = exponent >> 1;
  return power * __builtin_bit_cast(double, half << 52) * __builtin_bit_cast(double, (exponent - half) << 52);
}

template <class Real>
constexpr Real kGeluCubic = Real(0.044715);
template <class Real>
constexpr Real kTwiceRootTwoOverPi = Real(1.5957691216057308);  // 2 sqrt(2 / pi)

/// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3): one exponential, and no cancellation for x < 0.
template <class Real>
inline Real gelu(Real x) {
  const Real twice_u = kTwiceRootTwoOverPi<Real> * (x + kGeluCubic<Real> * x * x * x);
  return x / (Real(1) + exponential(-twice_u));
}

/// s + x s (1 - s) (2u)', s = 1 / (1 + e^(-2u)), written in t = e^(-|2u|) <= 1 so that nothing overflows.
template <class Real>
inline Real gelu_derivative(Real x) {
  const Real square = x * x;
  const Real twice_u = kTwiceRootTwoOverPi<Real> * (x + kGeluCubic<Real> * square * x);
  const Real slope = kTwiceRootTwoOverPi<Real> * (Real(1) + Real(3) * kGeluCubic<Real> * square);
  const Real t = exponential(-magnitude(twice_u));
  const Real inverse = Real(1) / (Real(1) + t);
  const Real s = twice_u < Real(0) ? t * inverse : inverse;
  return s + x * (t * inverse * inverse) * slope;
}

}  // namespace
}  // namespace tandem::cpu
