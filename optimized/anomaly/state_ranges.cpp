// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/state_ranges.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/io/hash.h"

namespace tandem {
namespace {

// As numbers, magnitudes of the same sign are in the order of their bits: the largest is a maximum of integers, which needs no
// arithmetic on NaN and becomes vector instructions. Signed ones, which every x86-64 compares.
template <class Bits>
std::make_unsigned_t<Bits> largest_bits(const std::byte* bytes, std::int64_t count) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  Bits largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Bits value = 0;
    std::memcpy(&value, bytes + i * static_cast<std::int64_t>(sizeof(Bits)), sizeof(Bits));
    const auto magnitude = static_cast<Bits>(value & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<std::make_unsigned_t<Bits>>(largest);
}

double magnitude_of_fp16(std::uint16_t bits) {
  const int exponent = bits >> 10;
  const int mantissa = bits & 0x3ff;
  return exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
}

double largest_in(DType dtype, const std::byte* bytes, std::int64_t count) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  switch (dtype) {
    case DType::f64: {
      const auto bits = largest_bits<std::int64_t>(bytes, count);
      return bits >= 0x7ff0000000000000U ? kInfinity : std::bit_cast<double>(bits);
    }
    case DType::f32: {
      const auto bits = largest_bits<std::int32_t>(bytes, count);
      return bits >= 0x7f800000U ? kInfinity : static_cast<double>(std::bit_cast<float>(bits));
    }
    case DType::bf16: {
      const auto bits = largest_bits<std::int16_t>(bytes, count);
      return bits >= 0x7f80U ? kInfinity : static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
    }
    case DType::f16: {
      const auto bits = largest_bits<std::int16_t>(bytes, count);
      return bits >= 0x7c00U ? kInfinity : magnitude_of_fp16(bits);
    }
    default: break;
  }
  TANDEM_CHECK(false, "a tensor of floating values is needed");
  return 0;
}

constexpr std::int64_t kBlockBytes = 1 << 15;

TensorLook look(TensorView values, std::uint64_t seed, bool hashes) {
  TensorLook seen;
  seen.hash = seed;
  const auto* const bytes = static_cast<const std::byte*>(values.data());
  const std::int64_t size = values ? values.size_bytes() : 0;
  const auto element = static_cast<std::int64_t>(size_bytes(values.dtype()));
  for (std::int64_t at = 0; at < size; at += kBlockBytes) {
    const std::int64_t count = std::min(kBlockBytes, size - at);
    seen.largest = std::max(seen.largest, largest_in(values.dtype(), bytes + at, count / element));
    if (hashes) seen.hash = hash64(std::span(bytes + at, static_cast<std::size_t>(count)), seen.hash);
  }
  seen.finite = std::isfinite(seen.largest);
  return seen;
}

}  // namespace

TensorLook look_at(TensorView values, std::uint64_t seed) { return look(values, seed, true); }
TensorLook range_of(TensorView values) { return look(values, 0, false); }

std::vector<StatePiece> state_pieces(const ParameterStore& store) {
  std::vector<StatePiece> pieces;
  for (std::size_t i = 0; i < store.size(); ++i) {
    if (store.keeps_whole(i)) pieces.push_back({i, store.spec(i).name, store.parameter(i).flat(), true, true});
  }
  // Without ZeRO the parts are whole tensors.
  const bool whole = store.zero_stage() == 0;
  for (const OwnedPart& part : store.parts()) {
    const std::string& name = store.spec(part.parameter).name;
    if (!store.keeps_whole(part.parameter)) pieces.push_back({part.parameter, name, store.stored(part), false, true});
    if (store.has_master_copy()) pieces.push_back({part.parameter, "master " + name, store.master(part), whole, false});
    for (const auto& [prefix, view] : {std::pair("m.", store.first_moment(part)), std::pair("v.", store.second_moment(part))}) {
      if (view) pieces.push_back({part.parameter, prefix + name, view, whole, false});
    }
  }
  return pieces;
}

void WeightRanges::count_update(double rate, double clipped_norm) { moved_ += rate * std::max(4.0, 10 * clipped_norm); }

std::optional<WeightRanges::Excess> WeightRanges::see(const std::string& tensor, double largest) {
  const auto [entry, is_new] = largest_.try_emplace(tensor, largest);
  const double limit = 8 * entry->second + 1 + moved_;
  entry->second = largest;
  if (is_new || largest <= limit) return std::nullopt;
  return Excess{tensor, largest, limit};
}

void WeightRanges::clear() noexcept {
  largest_.clear();
  moved_ = 0;
}

}  // namespace tandem
