// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/sum.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace tandem {
namespace {

using Sources = std::span<const std::byte* const>;
using Destinations = std::span<std::byte* const>;

// Bytes summed before they are stored to every destination: the sum stays in the first-level cache.
constexpr std::int64_t kTileBytes = 8192;

// How elements of a dtype are stored and in what they are added. Stored elements may lie at any address.
template <class T>
struct Plain {
  typedef T Stored __attribute__((aligned(1), may_alias));
  using Sum = T;
  [[gnu::always_inline]] static Sum widen(T value) { return value; }
  [[gnu::always_inline]] static T narrow(Sum value) { return value; }
};

struct Brain {  // bf16 is the upper half of fp32
  typedef std::uint16_t Stored __attribute__((aligned(1), may_alias));
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
  typedef std::uint16_t Stored __attribute__((aligned(1), may_alias));
  using Sum = float;
  static Sum widen(std::uint16_t bits) { return from_f16_bits(bits); }
  static std::uint16_t narrow(Sum value) { return to_f16_bits(value); }
};

template <class Format>
[[gnu::always_inline]] inline void sum_tile(Sources sources, std::int64_t first, std::int64_t count,
                                            typename Format::Sum* __restrict__ sum) {
  using Stored = const typename Format::Stored;
  const auto* a = reinterpret_cast<Stored*>(sources[0]) + first;
  if (sources.size() == 1) {
    for (std::int64_t i = 0; i < count; ++i) sum[i] = Format::widen(a[i]);
    return;
  }
  const auto* b = reinterpret_cast<Stored*>(sources[1]) + first;
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] = static_cast<typename Format::Sum>(Format::widen(a[i]) + Format::widen(b[i]));
  }
  for (std::size_t s = 2; s < sources.size(); ++s) {
    const auto* next = reinterpret_cast<Stored*>(sources[s]) + first;
    for (std::int64_t i = 0; i < count; ++i) sum[i] = static_cast<typename Format::Sum>(sum[i] + Format::widen(next[i]));
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

// Integers are added unsigned, so that they wrap around.
[[gnu::always_inline]] inline void sum_dtype(DType dtype, Sources sources, Destinations destinations, std::int64_t count) {
  switch (dtype) {
    case DType::f32: return sum_all<Plain<float>>(sources, destinations, count);
    case DType::f64: return sum_all<Plain<double>>(sources, destinations, count);
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

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512bw,avx512vl")]] void sum_avx512(DType dtype, Sources sources, Destinations destinations,
                                                             std::int64_t count) {
  sum_dtype(dtype, sources, destinations, count);
}
[[gnu::target("avx2")]] void sum_avx2(DType dtype, Sources sources, Destinations destinations, std::int64_t count) {
  sum_dtype(dtype, sources, destinations, count);
}
#endif

}  // namespace

void sum_in_order(DType dtype, Sources sources, Destinations destinations, std::int64_t count) noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return sum_avx512(dtype, sources, destinations, count);
  if (__builtin_cpu_supports("avx2")) return sum_avx2(dtype, sources, destinations, count);
#endif
  sum_dtype(dtype, sources, destinations, count);
}

}  // namespace tandem
