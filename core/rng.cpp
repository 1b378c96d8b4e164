// SPDX-License-Identifier: Apache-2.0
#include "core/rng.h"

#include <cmath>
#include <numbers>

#include "core/error.h"

namespace tandem {
namespace {

// Top bits of the fourth counter word: parameters and sequences must never meet a dropout mask (layer * 8 + site < 2^31).
constexpr std::uint32_t kParameterDomain = 0x80000000U;
constexpr std::uint32_t kSequenceDomain = 0xC0000000U;

std::array<std::uint32_t, 2> key_of(std::uint64_t seed) {
  return {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
}

// (0, 1): never zero, so that its logarithm is finite.
double open_unit(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

double box_muller(const PhiloxBlock& block, bool second) {
  const double radius = std::sqrt(-2.0 * std::log(open_unit(block[0], block[1])));
  const double angle = 2.0 * std::numbers::pi * open_unit(block[2], block[3]);
  return radius * (second ? std::sin(angle) : std::cos(angle));
}

}  // namespace

std::uint32_t dropout_threshold(double probability) {
  TANDEM_CHECK(probability >= 0.0 && probability < 1.0);
  return static_cast<std::uint32_t>(std::floor(probability * 0x1p32));
}

double parameter_normal(std::uint64_t seed, std::string_view name, std::uint64_t element_index) {
  const std::uint64_t pair = element_index / 2;
  const std::uint64_t hash = fnv1a(name);
  const PhiloxBlock counter = {static_cast<std::uint32_t>(pair), static_cast<std::uint32_t>(pair >> 32),
                               static_cast<std::uint32_t>(hash),
                               kParameterDomain | (static_cast<std::uint32_t>(hash >> 32) & 0x3FFFFFFFU)};
  return box_muller(philox4x32(counter, key_of(seed)), element_index % 2 != 0);
}

CounterRng::CounterRng(std::uint64_t seed, std::string_view stream, std::uint64_t position)
    : key_(key_of(seed)), stream_(fnv1a(stream)), position_(position) {}

std::uint32_t CounterRng::next_u32() noexcept {
  const std::uint64_t block = position_ / 4;
  const PhiloxBlock counter = {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                               static_cast<std::uint32_t>(stream_),
                               kSequenceDomain | (static_cast<std::uint32_t>(stream_ >> 32) & 0x3FFFFFFFU)};
  return philox4x32(counter, key_)[position_++ % 4];
}

std::uint64_t CounterRng::next_u64() noexcept {
  const std::uint64_t high = next_u32();
  return high << 32 | next_u32();
}

std::uint64_t CounterRng::next_below(std::uint64_t bound) noexcept {
  // Rejection above the largest multiple of bound keeps every value equally likely.
  const std::uint64_t limit = ~std::uint64_t{0} - (~std::uint64_t{0} % bound + 1) % bound;
  std::uint64_t value = next_u64();
  while (value > limit) value = next_u64();
  return value % bound;
}

double CounterRng::next_unit() noexcept { return static_cast<double>(next_u64() >> 11) * 0x1p-53; }

double CounterRng::next_normal() noexcept {
  PhiloxBlock block;
  for (auto& word : block) word = next_u32();
  return box_muller(block, false);
}

}  // namespace tandem
