// SPDX-License-Identifier: Apache-2.0
#include "core/dtype.h"

#include <array>
#include <bit>
#include <cmath>

#include <fmt/format.h>

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

Numerics numerics_from_precision(std::string_view precision) {
  if (precision == "fp32") return {};
  if (precision == "fp64") return {DType::f64, DType::f64, DType::f64, DType::f64, DType::f64};
  throw InputError(fmt::format("precision '{}' is not supported; use fp32 or fp64", precision));
}

}  // namespace tandem
