// SPDX-License-Identifier: Apache-2.0
#include "core/dtype.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"

namespace tandem {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::size_t size_bytes;
};

constexpr std::array kDTypes = {
    DTypeInfo{DType::f64, "fp64", 8},  DTypeInfo{DType::f32, "fp32", 4},  DTypeInfo{DType::f16, "fp16", 2},
    DTypeInfo{DType::bf16, "bf16", 2}, DTypeInfo{DType::i64, "int64", 8}, DTypeInfo{DType::i32, "int32", 4},
    DTypeInfo{DType::i16, "int16", 2}, DTypeInfo{DType::i8, "int8", 1},   DTypeInfo{DType::u16, "uint16", 2},
    DTypeInfo{DType::u8, "uint8", 1},
};

const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::size_t size_bytes(DType dtype) { return info(dtype).size_bytes; }

std::string_view name(DType dtype) { return info(dtype).name; }

DType parse_dtype(std::string_view name) {
  for (const DTypeInfo& candidate : kDTypes) {
    if (candidate.name == name) return candidate.dtype;
  }
  throw InputError(fmt::format("unknown dtype '{}'", name));
}

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
    default: throw ContractError(fmt::format("{} is not a floating dtype", name(dtype)));
  }
}

std::uint16_t to_bf16_bits(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

float from_bf16_bits(std::uint16_t bits) noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t to_f16_bits(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // 65520 and above round to infinity
  if (magnitude < 0x38800000U) {                        // below 2^-14: subnormal; adding 0.5 lets the FPU round
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U);
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + (magnitude >> 13 & 1U);
  return sign | static_cast<std::uint16_t>((rounded - 0x38000000U) >> 13);
}

float from_f16_bits(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1FU;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 112U) << 23 | mantissa << 13);
}

float largest(Fp8Format format) noexcept { return format == Fp8Format::e4m3 ? 448.0F : 57344.0F; }

float round_to_fp8(float value, Fp8Format format) noexcept {
  if (std::isnan(value) || value == 0.0F) return value;
  const float most = largest(format);
  if (std::fabs(value) >= most) return std::copysign(most, value);
  const int mantissa_bits = format == Fp8Format::e4m3 ? 3 : 2;
  const int least_exponent = format == Fp8Format::e4m3 ? -6 : -14;  // of a normal number
  const int exponent = std::max(std::ilogb(value), least_exponent);
  // nearbyint rounds ties to even; what is rounded up beyond a power of two is representable as well.
  const float quantum = std::ldexp(1.0F, exponent - mantissa_bits);
  return std::clamp(std::nearbyint(value / quantum) * quantum, -most, most);
}

float round_to(float value, DType dtype) noexcept {
  if (dtype == DType::bf16) return from_bf16_bits(to_bf16_bits(value));
  if (dtype == DType::f16) return from_f16_bits(to_f16_bits(value));
  return value;
}

namespace {

struct Precision {
  std::string_view name;
  Numerics numerics;
};

const std::vector<Precision>& all_precisions() {
  using enum DType;
  static const std::vector<Precision> kAll = {
      {"fp64", {f64, f64, f64, f64, f64}},           {"fp32", {}},
      {"bf16", {bf16, bf16, f32, f32, f32}},         {"fp16", {f16, f16, f32, f32, f32}},
      {"bf16-autocast", {f32, bf16, f32, f32, f32}}, {"fp16-autocast", {f32, f16, f32, f32, f32}},
      {"fp8", {bf16, bf16, f32, f32, f32, true}},
  };
  return kAll;
}

}  // namespace

const std::vector<std::string_view>& precisions() {
  static const std::vector<std::string_view> kNames = [] {
    std::vector<std::string_view> names;
    for (const Precision& precision : all_precisions()) names.push_back(precision.name);
    return names;
  }();
  return kNames;
}

Numerics numerics_from_precision(std::string_view precision) {
  for (const Precision& candidate : all_precisions()) {
    if (candidate.name == precision) return candidate.numerics;
  }
  throw InputError(fmt::format("precision '{}' is not supported; use one of {}", precision, fmt::join(precisions(), ", ")));
}

}  // namespace tandem
