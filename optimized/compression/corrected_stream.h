// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "optimized/compression/codec.h"

/// What the loops of the codecs share. All always_inline: compiled for the instruction set of the caller.
namespace tandem::detail {

/// gradient + residual, or the gradient without kAdd. `residual` may be null then.
template <bool kAdd>
[[gnu::always_inline]] inline float corrected(const float* gradient, const float* residual, std::int64_t i) {
  if constexpr (kAdd) return gradient[i] + residual[i];
  return gradient[i];
}

/// Order of the result is that of magnitudes, with infinity and then NaN above all numbers.
[[gnu::always_inline]] inline std::int32_t magnitude_bits(float value) {
  return std::bit_cast<std::int32_t>(value) & static_cast<std::int32_t>(kMagnitudeMask);
}

/// The operands of a call from some element on.
template <bool kAdd, bool kKeep>
struct CorrectedStream {
  const float* gradient;
  const float* residual;
  float* new_residual;

  explicit CorrectedStream(const CompressCall& call)
      : gradient(call.gradient.data()), residual(call.residual.data()), new_residual(call.new_residual.data()) {}

  [[gnu::always_inline]] void advance(std::int64_t count) {
    gradient += count;
    if constexpr (kAdd) residual += count;
    if constexpr (kKeep) new_residual += count;
  }
};

/// Calls function.operator()<kAdd, kKeep>() for the operands that a call has.
template <class Function>
auto with_operands(const CompressCall& call, const Function& function) {
  if (!call.residual.empty()) return function.template operator()<true, true>();
  if (!call.new_residual.empty()) return function.template operator()<false, true>();
  return function.template operator()<false, false>();
}

}  // namespace tandem::detail
