// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/sum_in_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

namespace tandem {
namespace {

using Sources = std::span<const std::byte* const>;
using Destinations = std::span<std::byte* const>;

// Bytes summed before they are stored to every destination: the sum stays in the first-level cache.
constexpr std::int64_t kTileBytes = 8192;

// Elements may lie at any address: they are read as bytes, which the compiler turns into unaligned vector loads.
template <class T>
[[gnu::always_inline]] inline T load(const std::byte* from, std::int64_t index) {
  T value;
  std::memcpy(&value, from + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// How elements of a dtype are stored and in what they are added.
template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  [[gnu::always_inline]] static Sum widen(T value) { return value; }
  [[gnu::always_inline]] static T narrow(Sum value) { return value; }
};

struct Brain {  // bf16 is the upper half of fp32
  using Stored = std::uint16_t;
  using Sum = float;
  [[gnu::always_inline]] static Sum widen(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  [[gnu::always_inline]] static std::uint16_t narrow(Sum value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
    const std::uint32_t quiet_nan = bits >> 16 | 0x40U;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded);
  }
};

struct Half {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum widen(std::uint16_t bits) { return from_f16_bits(bits); }
  static std::uint16_t narrow(Sum value) { return to_f16_bits(value); }
};

template <class Format>
[[gnu::always_inline]] inline void sum_tile(Sources sources, std::int64_t first, std::int64_t count,
                                            typename Format::Sum* __restrict__ sum) {
  using Stored = typename Format::Stored;
  const auto start = first * static_cast<std::int64_t>(sizeof(Stored));
  const std::byte* const a = sources[0] + start;
  if (sources.size() == 1) {
    for (std::int64_t i = 0; i < count; ++i) sum[i] = Format::widen(load<Stored>(a, i));
    return;
  }
  const std::byte* const b = sources[1] + start;
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] = static_cast<typename Format::Sum>(Format::widen(load<Stored>(a, i)) + Format::widen(load<Stored>(b, i)));
  }
  for (std::size_t s = 2; s < sources.size(); ++s) {
    const std::byte* const next = sources[s] + start;
    for (std::int64_t i = 0; i < count; ++i)
      sum[i] = static_cast<typename Format::Sum>(sum[i] + Format::widen(load<Stored>(next, i)));
  }
}

template <class Format>
[[gnu::always_inline]] inline void sum_all(Sources sources, Destinations destinations, std::int64_t count) {
  using Sum = typename Format::Sum;
  using Stored = typename Format::Stored;
  constexpr std::int64_t kTile = kTileBytes / static_cast<std::int64_t>(sizeof(Sum));
  alignas(64) Sum sum[kTile];
  alignas(64) std::uint16_t narrowed[std::is_same_v<Format, Plain<Sum>> ? 1 : kTile];
  for (std::int64_t first = 0; first < count; first += kTile) {
    const std::int64_t length = std::min(kTile, count - first);
    sum_tile<Format>(sources, first, length, sum);
    const void* result = sum;
    if constexpr (!std::is_same_v<Format, Plain<Sum>>) {
      for (std::int64_t i = 0; i < length; ++i) narrowed[i] = Format::narrow(sum[i]);
      result = narrowed;
    }
    for (std::byte* destination : destinations) {
      std::memcpy(destination + first * static_cast<std::int64_t>(sizeof(Stored)), result,
                  static_cast<std::size_t>(length) * sizeof(Stored));
    }
  }
}

// The same without a detour: a vector of each source is added in registers and stored to every destination, the lines of which
// are in the first-level cache because they are, mostly, those of the sources. Half the time of the tiles while everything fits
// into the caches; for few sources, because each has an address register and a stream of prefetches of its own.
template <class T, std::int64_t kVectorBytes, std::size_t kSources, bool kToAll>
[[gnu::always_inline]] inline void sum_few(Sources sources, Destinations destinations, std::int64_t count) {
  using Vector [[gnu::vector_size(kVectorBytes), gnu::aligned(1), gnu::may_alias]] = T;
  constexpr std::size_t kDestinations = kToAll ? kSources : 1;
  constexpr auto kWidth = static_cast<std::int64_t>(sizeof(T));
  const std::byte* from[kSources];
  std::byte* to[kDestinations];
  std::copy_n(sources.begin(), kSources, from);
  std::copy_n(destinations.begin(), kDestinations, to);
  const std::int64_t in_vectors = count * kWidth / kVectorBytes * kVectorBytes;
  for (std::int64_t i = 0; i < in_vectors; i += kVectorBytes) {
    Vector sum = *reinterpret_cast<const Vector*>(from[0] + i);
#pragma GCC unroll 4
    for (std::size_t s = 1; s < kSources; ++s) sum += *reinterpret_cast<const Vector*>(from[s] + i);
#pragma GCC unroll 4
    for (std::size_t d = 0; d < kDestinations; ++d) *reinterpret_cast<Vector*>(to[d] + i) = sum;
  }
  for (std::size_t s = 0; s < kSources; ++s) from[s] += in_vectors;
  for (std::size_t d = 0; d < kDestinations; ++d) to[d] += in_vectors;
  sum_all<Plain<T>>(from, to, count - in_vectors / kWidth);
}

template <class T, std::int64_t kVectorBytes>
[[gnu::always_inline]] inline void sum_plain(Sources sources, Destinations destinations, std::int64_t count) {
  if (destinations.size() == 1) {
    switch (sources.size()) {
      case 2: return sum_few<T, kVectorBytes, 2, false>(sources, destinations, count);
      case 3: return sum_few<T, kVectorBytes, 3, false>(sources, destinations, count);
      case 4: return sum_few<T, kVectorBytes, 4, false>(sources, destinations, count);
      default: break;
    }
  }
  if (destinations.size() == sources.size()) {
    switch (sources.size()) {
      case 2: return sum_few<T, kVectorBytes, 2, true>(sources, destinations, count);
      case 3: return sum_few<T, kVectorBytes, 3, true>(sources, destinations, count);
      case 4: return sum_few<T, kVectorBytes, 4, true>(sources, destinations, count);
      default: break;
    }
  }
  sum_all<Plain<T>>(sources, destinations, count);
}

// Integers are added unsigned, so that they wrap around.
template <std::int64_t kVectorBytes>
[[gnu::always_inline]] inline void sum_dtype(DType dtype, Sources sources, Destinations destinations, std::int64_t count) {
  switch (dtype) {
    case DType::f32: return sum_plain<float, kVectorBytes>(sources, destinations, count);
    case DType::f64: return sum_plain<double, kVectorBytes>(sources, destinations, count);
    case DType::bf16: return sum_all<Brain>(sources, destinations, count);
    case DType::f16: return sum_all<Half>(sources, destinations, count);
    case DType::i64: return sum_all<Plain<std::uint64_t>>(sources, destinations, count);
    case DType::i32: return sum_all<Plain<std::uint32_t>>(sources, destinations, count);
    case DType::i16:
    case DType::u16: return sum_all<Plain<std::uint16_t>>(sources, destinations, count);
    case DType::i8:
    case DType::u8: return sum_all<Plain<std::uint8_t>>(sources, destinations, count);
  }
}

void sum_baseline(DType dtype, Sources sources, Destinations destinations, std::int64_t count) {
  sum_dtype<16>(dtype, sources, destinations, count);
}

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512bw,avx512vl")]] void sum_avx512(DType dtype, Sources sources, Destinations destinations,
                                                             std::int64_t count) {
  sum_dtype<64>(dtype, sources, destinations, count);
}

[[gnu::target("avx2")]] void sum_avx2(DType dtype, Sources sources, Destinations destinations, std::int64_t count) {
  sum_dtype<32>(dtype, sources, destinations, count);
}

constexpr std::array kVariants = {SumVariant{"avx512", sum_avx512}, SumVariant{"avx2", sum_avx2},
                                  SumVariant{"baseline", sum_baseline}};

std::size_t first_usable() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) return 0;
  return __builtin_cpu_supports("avx2") ? 1 : 2;
}
#else
constexpr std::array kVariants = {SumVariant{"baseline", sum_baseline}};

std::size_t first_usable() { return 0; }
#endif

}  // namespace

std::span<const SumVariant> sum_variants() noexcept { return std::span(kVariants).subspan(first_usable()); }

void sum_in_order(DType dtype, Sources sources, Destinations destinations, std::int64_t count) noexcept {
  sum_variants().front().sum(dtype, sources, destinations, count);
}

}  // namespace tandem
