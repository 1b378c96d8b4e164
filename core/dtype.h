// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem {

enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u16, u8 };

[[nodiscard]] std::size_t size_bytes(DType dtype);

/// "fp64", "fp32", "fp16", "bf16", "int32", ...: the names that plans and case names use.
[[nodiscard]] std::string_view name(DType dtype);

/// Inverse of name(); throws InputError on an unknown name.
[[nodiscard]] DType parse_dtype(std::string_view name);

/// Unit roundoff u of a floating dtype: the relative error of one correctly rounded operation (2^-53, 2^-24, 2^-11, 2^-8).
[[nodiscard]] double unit_roundoff(DType dtype);

/// dtype_of<float> and so on: the DType that a C++ type stores. Not defined for other types.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<std::int8_t> {
  static constexpr DType value = DType::i8;
};
template <>
struct DTypeOf<std::uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

/// IEEE binary16 and bfloat16 from and to binary32, round to nearest even, NaN kept NaN, overflow to infinity.
/// bit patterns in std::uint16_t: arithmetic is never done in these types.
[[nodiscard]] std::uint16_t to_f16_bits(float value) noexcept;
[[nodiscard]] float from_f16_bits(std::uint16_t bits) noexcept;
[[nodiscard]] std::uint16_t to_bf16_bits(float value) noexcept;
[[nodiscard]] float from_bf16_bits(std::uint16_t bits) noexcept;

/// What a training step computes in.
///
/// storage     parameters and activations at rest
/// compute     operands of the matrix products
/// accumulate  sums across micro-batches (the gradient buffers)
/// master      the copy of the parameters that the optimizer updates, and its moments
/// reduce      what gradients are on the wire between ranks
struct Numerics {
  DType storage = DType::f32;
  DType compute = DType::f32;
  DType accumulate = DType::f32;
  DType master = DType::f32;
  DType reduce = DType::f32;

  friend bool operator==(const Numerics&, const Numerics&) = default;
};

/// "fp64" and "fp32": that dtype throughout. Throws InputError for any other name, listing those that exist.
[[nodiscard]] Numerics numerics_from_precision(std::string_view precision);

}  // namespace tandem
