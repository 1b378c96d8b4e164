// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/epoch_order.h"

#include <bit>

#include <fmt/format.h>

#include "core/error.h"
#include "core/rng.h"

namespace tandem {
namespace {

constexpr std::uint32_t kRounds = 8;

}  // namespace

EpochOrder::EpochOrder(std::int64_t samples, std::uint64_t seed, std::int64_t epoch)
    : EpochOrder(samples, seed, fmt::format("data_pipeline/epoch/{}", epoch)) {}

EpochOrder::EpochOrder(std::int64_t samples, std::uint64_t seed, std::string_view stream)
    : samples_(static_cast<std::uint64_t>(samples)) {
  TANDEM_CHECK(samples >= 1 && samples <= (std::int64_t{1} << 62), fmt::format("{} samples", samples));
  const int bits = std::bit_width(samples_ - 1);
  half_bits_ = std::max(4, (bits + 1) / 2);
  const std::uint64_t key = CounterRng(seed, stream).next_u64();
  key_ = {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

std::int64_t EpochOrder::sample(std::int64_t place) const {
  auto x = static_cast<std::uint64_t>(place);
  TANDEM_CHECK(place >= 0 && x < samples_, fmt::format("place {} of {}", place, samples_));
  // The network permutes a power of four. Following its cycle from inside comes back inside, so this permutes the samples.
  do x = permute(x);
  while (x >= samples_);
  return static_cast<std::int64_t>(x);
}

std::uint64_t EpochOrder::permute(std::uint64_t place) const noexcept {
  const auto mask = static_cast<std::uint32_t>((std::uint64_t{1} << half_bits_) - 1);
  auto left = static_cast<std::uint32_t>(place >> half_bits_);
  auto right = static_cast<std::uint32_t>(place) & mask;
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    left ^= philox4x32({right, round, 0, 0}, key_)[0] & mask;
    std::swap(left, right);
  }
  return std::uint64_t{left} << half_bits_ | right;
}

}  // namespace tandem
