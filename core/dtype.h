// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

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

/// FP8 (OFP8, Micikevicius et al. 2022): e4m3 has no infinity and reaches 448, e5m2 reaches 57344. Values beyond saturate.
enum class Fp8Format : std::uint8_t { e4m3, e5m2 };
[[nodiscard]] float largest(Fp8Format format) noexcept;
/// The fp8 number nearest to value (ties to even), as a float; NaN stays NaN.
[[nodiscard]] float round_to_fp8(float value, Fp8Format format) noexcept;

/// value rounded to `dtype` (fp32, bf16 or fp16) and back.
[[nodiscard]] float round_to(float value, DType dtype) noexcept;
[[nodiscard]] inline bool is_16bit(DType dtype) noexcept { return dtype == DType::f16 || dtype == DType::bf16; }
/// What statistics and sums of tensors in `storage` are kept in: fp32 for 16-bit ones, else the same.
[[nodiscard]] inline DType wide(DType storage) noexcept { return is_16bit(storage) ? DType::f32 : storage; }

/// What a training step computes in.
///
/// storage     parameters and activations at rest
/// compute     operands of the matrix products; with 16-bit storage the same. A narrower one than storage is autocast: operands
///             are rounded on their way into the product, its result is not
/// accumulate  sums across micro-batches (the gradient buffers)
/// master      the copy of the parameters that the optimizer updates, and its moments; where storage is the same, there is one
///             copy
/// reduce      what gradients are on the wire between ranks (summed in fp32)
/// fp8         operands of the linear layers inside blocks are fp8 numbers (docs/techniques/loss_scaling.md)
struct Numerics {
  DType storage = DType::f32;
  DType compute = DType::f32;
  DType accumulate = DType::f32;
  DType master = DType::f32;
  DType reduce = DType::f32;
  bool fp8 = false;

  [[nodiscard]] bool has_master_copy() const noexcept { return storage != master; }
  [[nodiscard]] bool autocast() const noexcept { return storage == DType::f32 && compute != DType::f32; }
  friend bool operator==(const Numerics&, const Numerics&) = default;
};

/// "fp64", "fp32": that dtype throughout. "bf16", "fp16": 16-bit storage and compute, everything else fp32. "bf16-autocast",
/// "fp16-autocast": fp32 but for the operands of products. "fp8": bf16 with fp8 operands in linear layers. Throws InputError for
/// any other name, listing those that exist.
[[nodiscard]] Numerics numerics_from_precision(std::string_view precision);
[[nodiscard]] const std::vector<std::string_view>& precisions();

}  // namespace tandem
