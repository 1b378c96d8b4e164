// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace tandem {

/// For what the loops of the codecs are compiled. All give the same bits.
enum class InstructionSet : std::uint8_t { avx512, avx2, baseline };

[[nodiscard]] constexpr std::string_view name(InstructionSet set) noexcept {
  switch (set) {
    case InstructionSet::avx512: return "avx512";
    case InstructionSet::avx2: return "avx2";
    case InstructionSet::baseline: break;
  }
  return "baseline";
}

/// Those that this machine can run, best first.
[[nodiscard]] inline std::span<const InstructionSet> usable_instruction_sets() noexcept {
  static constexpr std::array kSets = {InstructionSet::avx512, InstructionSet::avx2, InstructionSet::baseline};
#if defined(__x86_64__)
  const bool avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return std::span(kSets).subspan(avx512 ? 0 : __builtin_cpu_supports("avx2") ? 1 : 2);
#else
  return std::span(kSets).subspan(2);
#endif
}

[[nodiscard]] inline InstructionSet best_instruction_set() noexcept { return usable_instruction_sets().front(); }

namespace detail {

#if defined(__x86_64__)
template <class Body>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")]] void run_avx512(const Body& body) {
  body();
}

template <class Body>
[[gnu::noinline, gnu::target("avx2")]] void run_avx2(const Body& body) {
  body();
}
#endif

}  // namespace detail

/// Calls body(), compiled for `set`. Its call operator and all that it should take along must be always_inline:
///   run_with(set, [&]() __attribute__((always_inline)) { loop(pointer, count); });
template <class Body>
void run_with(InstructionSet set, const Body& body) {
#if defined(__x86_64__)
  if (set == InstructionSet::avx512) return detail::run_avx512(body);
  if (set == InstructionSet::avx2) return detail::run_avx2(body);
#endif
  body();
}

}  // namespace tandem
