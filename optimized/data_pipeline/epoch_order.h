// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tandem {

/// p_e of core/text_data.h for one epoch: which sample comes at which place. A keyed permutation computed place by place: no list
/// is kept, and any place of any epoch costs the same (8 rounds of a Feistel network, walked at most a few times on average).
class EpochOrder {
 public:
  /// Throws ContractError unless 1 <= samples <= 2^62.
  EpochOrder(std::int64_t samples, std::uint64_t seed, std::int64_t epoch);
  /// The same keyed by the name of a stream of random numbers (core/rng.h).
  EpochOrder(std::int64_t samples, std::uint64_t seed, std::string_view stream);

  /// The sample at `place`, both in [0, samples).
  [[nodiscard]] std::int64_t sample(std::int64_t place) const;

 private:
  [[nodiscard]] std::uint64_t permute(std::uint64_t place) const noexcept;

  std::uint64_t samples_;
  int half_bits_ = 4;
  std::array<std::uint32_t, 2> key_{};
};

}  // namespace tandem
